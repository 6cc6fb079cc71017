"""Methods that choose how many bits each module gets."""

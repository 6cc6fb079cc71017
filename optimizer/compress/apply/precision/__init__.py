"""Apply the methods that choose how many bits each module gets."""

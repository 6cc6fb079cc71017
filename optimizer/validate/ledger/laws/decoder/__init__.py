"""Laws of a decoder: its cache, its steps, the texts that it generates."""

"""A bundle: its manifest, the engines that fit this machine, and its measurement."""

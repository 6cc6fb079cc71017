"""The commands, a file each; what one of them computes stands beside it. Heavy packages are
imported inside them, so that `optimize --help` answers at once."""

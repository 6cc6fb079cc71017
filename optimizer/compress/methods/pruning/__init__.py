"""Methods that choose which weights are zero."""

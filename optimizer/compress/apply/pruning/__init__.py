"""Apply the methods that choose which weights are zero."""

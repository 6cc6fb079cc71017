"""Apply the pruning methods."""

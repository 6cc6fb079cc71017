"""Apply each method to the blocks of a walk."""

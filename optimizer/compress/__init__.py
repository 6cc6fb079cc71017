"""From a float checkpoint to a compressed state: one walk over the blocks."""

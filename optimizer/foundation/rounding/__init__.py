"""FP8 values; rounding at random, and how far apart correct runs may lie."""

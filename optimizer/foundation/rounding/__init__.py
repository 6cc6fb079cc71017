"""Rounding at random, and how far apart correct runs may lie."""

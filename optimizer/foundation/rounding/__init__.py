"""Arithmetic of small float types, random rounding, and bounds on the distance of correct runs."""

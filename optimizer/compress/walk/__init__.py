"""A model block by block, on calibration data, under a byte budget."""

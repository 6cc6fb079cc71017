"""Run a model block by block on calibration data, under a memory budget."""

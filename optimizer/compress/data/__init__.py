"""Calibration batches."""

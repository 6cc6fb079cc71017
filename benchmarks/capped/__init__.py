"""Whole recipes under a cap of memory."""

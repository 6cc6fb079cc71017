"""Interleaved timings of baseline and candidate: is it as fast as promised?"""

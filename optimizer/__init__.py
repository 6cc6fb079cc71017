"""Compress a Hugging Face checkpoint, prove that it is the same model, and package a bundle.

Folders in processing order: load, reduce, compress, export, lower, validate, package, publish; and
harness, which runs a bundle. `pipeline.py` shows the flow on one screen.
"""

__version__ = "0.1.0"

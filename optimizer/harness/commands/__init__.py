"""The commands of python -m harness."""

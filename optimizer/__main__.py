"""Run `optimize` as `python -m optimizer`."""

from optimizer.cli import main

main()

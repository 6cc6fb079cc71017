"""`python -m optimizer` is `optimize`."""

from optimizer.cli import main

main()

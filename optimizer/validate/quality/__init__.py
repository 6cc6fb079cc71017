"""Quality gates: baseline and candidate answer the same examples, and a paired test decides."""

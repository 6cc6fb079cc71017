"""Parts that benchmarks share: processes that take turns, models, tables of results."""

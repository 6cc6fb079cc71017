"""How fast models of fewer blocks, neurons and heads are, timed before any is chosen."""

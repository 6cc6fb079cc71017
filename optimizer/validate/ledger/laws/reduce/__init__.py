"""Laws of smaller and of trained checkpoints."""

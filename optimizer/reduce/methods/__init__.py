"""What decides which neurons, heads and blocks are kept: pure maths on tensors."""

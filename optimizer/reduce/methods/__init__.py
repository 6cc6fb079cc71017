"""Methods that choose neurons, heads and blocks, and losses of training: pure maths on tensors."""

"""What a method computes: pure functions of tensors."""

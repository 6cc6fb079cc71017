"""The arithmetic of each method: pure functions of tensors."""

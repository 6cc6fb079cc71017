"""Read a tokenizer, and check that it belongs to the checkpoint."""

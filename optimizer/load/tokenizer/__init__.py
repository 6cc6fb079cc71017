"""Reading a tokenizer, and proving that it is the checkpoint's own."""

"""Search of a corpus with quantized embeddings, compared with the float model's."""

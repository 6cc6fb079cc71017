"""compressed-tensors: a Hugging Face folder that transformers and vLLM load."""

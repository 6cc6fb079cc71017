"""GGUF: one file that llama.cpp runs, tokenizer and chat template in it."""

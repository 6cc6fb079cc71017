"""Laws of decoders: their KV cache, generation, arrays of steps and sampling."""

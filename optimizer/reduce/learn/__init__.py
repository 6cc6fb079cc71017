"""Learning from the reference: distillation, recovery and quantization-aware training."""

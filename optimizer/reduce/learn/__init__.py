"""Train a model on the outputs of the reference: distillation, recovery and quantization-aware
training."""

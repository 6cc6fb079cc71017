"""Read checkpoints that are already quantized: one file per format."""

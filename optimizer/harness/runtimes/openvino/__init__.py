"""OpenVINO: run.py opens a model, kernels.py says what it runs each layer in."""

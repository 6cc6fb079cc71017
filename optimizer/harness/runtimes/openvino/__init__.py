"""OpenVINO: core.py has its Core, run.py opens a model, kernels.py says what each layer runs in."""

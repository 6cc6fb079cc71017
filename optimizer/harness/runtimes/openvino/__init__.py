"""OpenVINO: core.py holds its Core, run.py opens models, kernels.py reads the layers' precision."""

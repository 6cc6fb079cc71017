"""Modules that every other folder uses: errors, atomic files, processes, and quantized tensors."""

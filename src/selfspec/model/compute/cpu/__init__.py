"""Our kernels for a CPU."""

"""Which drafted tokens to keep: pure functions, tensors and lists in, numbers out."""

"""Drafters that guess from the text and from what the model said of it."""

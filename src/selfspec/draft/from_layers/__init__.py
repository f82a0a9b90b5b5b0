"""Drafters that run part of the model."""

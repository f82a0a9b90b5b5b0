"""Drafters that run another network: a trained head, a second model."""

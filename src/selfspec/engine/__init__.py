"""Rows under way: draft, verify, keep, learn; and what a chat keeps between turns."""

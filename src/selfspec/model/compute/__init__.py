"""What a step computes with: plans, caches, operations."""

"""How many tokens to draft. Sees the contract only."""

"""Whether drafting pays for a model here, and with which settings: costs, a probe, a search."""

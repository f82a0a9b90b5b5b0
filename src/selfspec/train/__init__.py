"""Training: LayerSkip's recipe (layer dropout, early-exit loss, curricula) on a transformers model,
and what it gave."""

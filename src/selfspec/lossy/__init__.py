"""Decoding that may change what is written, and says so in its name: early exit, unverified.

What comes out is a `LossyResult`, never a `Result`.
"""

from .dynamic import AdaInfer, Confidence, SpecEE
from .fixed import early_exit_generate, first_layers
from .result import LossyResult

__all__ = ["AdaInfer", "Confidence", "LossyResult", "SpecEE", "early_exit_generate", "first_layers"]

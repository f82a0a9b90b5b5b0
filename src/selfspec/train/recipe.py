"""Recipe: the settings of LayerSkip's training, for a model of L layers at step t of T.

Our names and the paper's: `dropout` p_max, `exit_scale` e_scale, `rotation` R. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import OptionError, nearest
from . import curriculum

WORDS = {
    "dropout_depth": ("exponential", "constant"),
    "dropout_time": ("constant", "exponential"),
    "curriculum": ("rotational", "gradual", "all"),
    "weighting": ("quadratic", "even"),
}
VARIANTS = ("LD+EE", "LD", "EE", "plain")


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults suit fine-tuning of a model that is trained already."""

    dropout: float = 0.1
    """Chance of dropping the last layer for a sample (p_max), below 1. Earlier layers are dropped
    more rarely. 0 is off."""
    dropout_depth: str = "exponential"
    """How that chance grows with depth: exponential, or constant, the same mean at every layer."""
    dropout_time: str = "constant"
    """How that chance grows over the run: constant, or exponential from 0 (from scratch)."""
    exit_scale: float = 1.0
    """Weight of the early exits' losses beside the last layer's (e_scale), 0 to 1. 0 is off."""
    curriculum: str = "rotational"
    """Which early exits are trained at a step: rotational (a few, in turn), gradual (from the last
    one down, more and more), or all."""
    rotation: int | None = None
    """Steps in which a rotational curriculum trains each early exit once (R). By default half the
    number of exits, so two at a time."""
    weighting: str = "quadratic"
    """How early exits' losses weigh: quadratic, later ones more (the paper's), or even."""
    exits: tuple[int, ...] = ()
    """Train only the early exits after these numbers of layers, e.g. 8, 15 and 22; the curriculum
    goes through them. By default all."""
    share: float = 1.0
    """Share of the positions at which early exits are trained, above 0 to 1, drawn anew at each
    step. The last layer is trained at all positions."""
    exit_others: int = 0
    """Take early exits' losses over the tokens of the step's text and this many others, which makes
    steps cheaper. 0 takes the whole vocabulary, as the last layer always does."""

    def __post_init__(self) -> None:
        turn = self.rotation is None or self.rotation >= 1
        for fits, name, why in (
            (0 <= self.dropout <= 1, "dropout", "is outside 0 to 1; 0 turns it off"),
            (
                self.dropout != 1,
                "dropout",
                "drops the last layer always. It would never be trained",
            ),
            (0 <= self.exit_scale <= 1, "exit_scale", "is outside 0 to 1; 0 turns it off"),
            (0 < self.share <= 1, "share", "is outside 0 to 1; at 0 no position would be trained"),
            (self.exit_others >= 0, "exit_others", "is no number of tokens; 0 takes all of them"),
            (turn, "rotation", "is not a number of steps; 1 trains all exits at each"),
        ):
            if not fits:
                raise OptionError(f"{name}={getattr(self, name)} {why}")
        for name, known in WORDS.items():
            if (given := getattr(self, name)) not in known:
                raise OptionError(f"{name}={given!r} is not known; {nearest(given, known)}")

    def variant(self, name: str) -> Recipe:
        """The paper's ablation: layer dropout (LD), exit loss (EE), both (LD+EE) or neither."""
        if name not in VARIANTS:
            raise OptionError(f"variant {name!r} is not known; {nearest(name, VARIANTS)}")
        dropout = self.dropout if "LD" in name else 0.0
        return replace(self, dropout=dropout, exit_scale=self.exit_scale if "EE" in name else 0.0)

    def check(self, layers: int) -> None:
        """Raise unless the recipe makes sense for a model of that many layers."""
        if layers < 2 and (self.exit_scale or self.dropout):
            raise OptionError(
                f"this model has {layers} layer, so nothing can be dropped; use variant 'plain'"
            )
        for layer in self.exits:
            if not 0 < layer < layers:
                raise OptionError(
                    f"exit {layer} is not inside this model of {layers} layers; choose 1 to "
                    f"{layers - 1}"
                )
        if len(set(self.exits)) < len(self.exits):
            raise OptionError(f"exits={self.exits} names an exit twice; name it once")
        limit = len(self.exits) or layers
        if self.curriculum == "rotational" and self.rotation is not None and self.rotation > limit:
            kind = f"the {limit} chosen exits" if self.exits else f"the model's {layers} layers"
            raise OptionError(
                f"rotation={self.rotation} is more than {kind}, so at some steps no early exit "
                f"would be on; choose 1 to {limit}"
            )

    def dropout_rates(self, layers: int, step: int, steps: int) -> list[float]:
        """Each layer's chance of being dropped for a sample at this step."""
        peak = self.dropout * curriculum.time_scale(step, steps, self.dropout_time)
        return [peak * rate for rate in curriculum.depth_rates(layers, self.dropout_depth)]

    def exits_on(self, layers: int, step: int, steps: int) -> list[bool]:
        """Which exits the curriculum has on at this step."""
        chosen = [*(sorted(self.exits) or range(1, layers)), layers]
        if self.curriculum == "gradual":
            on = curriculum.gradual(len(chosen), step, steps)
        else:
            rotation = 1 if self.curriculum == "all" else self.rotation or max(1, len(chosen) // 2)
            on = curriculum.rotational(len(chosen), step, rotation)
        turned = dict(zip(chosen, on, strict=True))
        return [turned.get(layer + 1, False) for layer in range(layers)]

    def exit_weights(self, layers: int, step: int, steps: int) -> dict[int, float]:
        """Weights of the losses that count at this step, by layer. They add up to 1."""
        if self.weighting == "even":
            scales = [self.exit_scale] * (layers - 1) + [1.0]
        else:
            scales = curriculum.exit_scales(layers, self.exit_scale)
        weights = curriculum.exit_weights(scales, self.exits_on(layers, step, steps))
        return {layer: weight for layer, weight in enumerate(weights) if weight > 0}

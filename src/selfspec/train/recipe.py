"""Recipe: the settings of LayerSkip's training, and what they mean for a model of L layers at step
t of T.

Our names and the paper's: `dropout` p_max, `exit_scale` e_scale, `rotation` R. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import OptionError, nearest
from . import curriculum

DEPTHS = ("exponential", "constant")
TIMES = ("constant", "exponential")
CURRICULA = ("rotational", "gradual", "all")
WEIGHTINGS = ("quadratic", "even")
VARIANTS = ("LD+EE", "LD", "EE", "plain")


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults suit fine-tuning of a model that is trained already."""

    dropout: float = 0.1
    """Chance of dropping the last layer for a sample of a batch (p_max), 0 to below 1. Earlier
    layers are dropped more rarely. 0 is off."""
    dropout_depth: str = "exponential"
    """How that chance grows with depth: exponential, or constant, the same mean at every layer."""
    dropout_time: str = "constant"
    """How that chance grows over the run: constant, or exponential from 0 on, for training from
    scratch."""
    exit_scale: float = 1.0
    """Weight of the early exits' losses beside the last layer's (e_scale), 0 to 1. 0 is off."""
    curriculum: str = "rotational"
    """Which early exits are trained at a step: rotational (a few, in turn), gradual (from the last
    one down, more and more), or all."""
    rotation: int | None = None
    """In how many steps a rotational curriculum trains each early exit once (R). By default half
    the number of exits, so two at a time."""
    weighting: str = "quadratic"
    """How early exits' losses weigh: quadratic, the later the more (the paper's), or even, all the
    same."""
    exits: tuple[int, ...] = ()
    """Train only the early exits after these numbers of layers, e.g. 8, 15 and 22; the curriculum
    goes through them. By default all."""
    share: float = 1.0
    """Share of the positions at which early exits are trained, above 0 to 1, drawn anew at each
    step. The last layer is trained at all positions."""

    exit_others: int = 0
    """Take early exits' losses over the tokens of the step's text and this many others, drawn anew
    at each step: cheaper steps. 0 takes them over the whole vocabulary, as the last layer's always
    is."""

    def __post_init__(self) -> None:
        for name, value in (("dropout", self.dropout), ("exit_scale", self.exit_scale)):
            if not 0 <= value <= 1:
                raise OptionError(
                    f"{name}={value} is outside 0 to 1, where the recipe is defined; 0 turns it off"
                )
        if self.dropout == 1:
            raise OptionError(
                "dropout=1 would drop the last layer always, so it would never be trained; choose "
                "less than 1"
            )
        if not 0 < self.share <= 1:
            raise OptionError(
                f"share={self.share} is outside 0 to 1, so no position would be trained; 1 is all "
                f"of them"
            )
        if self.exit_others < 0:
            raise OptionError(
                f"exit_others={self.exit_others} is below 0; it counts tokens, and 0 takes the "
                f"whole vocabulary"
            )
        if self.rotation is not None and self.rotation < 1:
            raise OptionError(
                f"rotation={self.rotation} is not a number of steps; 1 trains every exit at every "
                f"step"
            )
        lists = {
            "dropout_depth": DEPTHS,
            "dropout_time": TIMES,
            "curriculum": CURRICULA,
            "weighting": WEIGHTINGS,
        }
        for name, known in lists.items():
            if (given := getattr(self, name)) not in known:
                raise OptionError(f"{name}={given!r} is not known; {nearest(given, known)}")

    def variant(self, name: str) -> Recipe:
        """LD (layer dropout only), EE (exit loss only), LD+EE (both), plain (neither): the paper's
        ablation."""
        if name not in VARIANTS:
            raise OptionError(f"variant {name!r} is not known; {nearest(name, VARIANTS)}")
        return replace(
            self,
            dropout=self.dropout if "LD" in name else 0.0,
            exit_scale=self.exit_scale if "EE" in name else 0.0,
        )

    def check(self, layers: int) -> None:
        """Raise unless the recipe says something about a model of that many layers."""
        if layers < 2 and (self.exit_scale or self.dropout):
            raise OptionError(
                f"this model has {layers} layer, so there is nothing to exit from or to drop; use "
                f"variant 'plain'"
            )
        for layer in self.exits:
            if not 0 < layer < layers:
                raise OptionError(
                    f"exit {layer} is not inside this model of {layers} layers; choose 1 to "
                    f"{layers - 1}"
                )
        if len(set(self.exits)) < len(self.exits):
            raise OptionError(
                f"exits={self.exits} names an exit twice; each has one weight, so name it once"
            )
        most = len(self.exits) or layers
        if self.curriculum == "rotational" and self.rotation is not None and self.rotation > most:
            raise OptionError(
                f"rotation={self.rotation} is more than "
                + (f"the {most} chosen exits" if self.exits else f"the model's {layers} layers")
                + f", so at some steps no early exit would be on; choose 1 to {most}"
            )

    def dropout_rates(self, layers: int, step: int, steps: int) -> list[float]:
        """Each layer's chance of being dropped for a sample at this step."""
        return curriculum.dropout_rates(
            layers, step, steps, self.dropout, self.dropout_depth, self.dropout_time
        )

    def exits_on(self, layers: int, step: int, steps: int) -> list[bool]:
        """Which exits the curriculum has on at this step."""
        if not self.exits:
            return self._curriculum(layers, step, steps)
        chosen = [*sorted(self.exits), layers]
        on = dict(zip(chosen, self._curriculum(len(chosen), step, steps), strict=True))
        return [on.get(layer + 1, False) for layer in range(layers)]

    def _curriculum(self, exits: int, step: int, steps: int) -> list[bool]:
        """Of so many exits, the last layer's among them, which are on."""
        if self.curriculum == "gradual":
            return curriculum.gradual(exits, step, steps)
        dilation = 1 if self.curriculum == "all" else self.rotation or max(1, exits // 2)
        return curriculum.rotational(exits, step, dilation)

    def exit_weights(self, layers: int, step: int, steps: int) -> dict[int, float]:
        """The losses that count at this step: index of the layer after which it is taken -> weight;
        they add up to 1."""
        if self.weighting == "even":
            scales = [self.exit_scale] * (layers - 1) + [1.0]
        else:
            scales = curriculum.exit_scales(layers, self.exit_scale)
        weights = curriculum.exit_weights(scales, self.exits_on(layers, step, steps))
        return {layer: weight for layer, weight in enumerate(weights) if weight > 0}

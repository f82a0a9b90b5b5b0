"""Draft & Verify: draft without some of the model's attention and MLP halves, verify with all.

Which halves are skipped is a pair of lists, a profile made for this model, or a strategy by name
that spreads a share of them over the layers. Source: Draft & Verify, section 3.2 (a vector z of 2 L
halves) and Table 7 (first, middle, last, random). The strategies gained little there, a search over
z was needed. What such a search finds goes here, as lists or a profile.

Layers before the first skip compute what the whole model computes, so verification goes on after
them. Not so with a part (ours): small trained matrices beside the linears, only while drafting.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from ...core.door import shown
from ...core.files import is_there
from ...core.json_text import from_json
from ...errors import OptionError, nearest
from ...model.compute.plan import LayerPlan
from ...model.family import Shape
from ...trained.files import TrainedPart, find_part, partial_head_of, ready
from ...trained.lora import lora_view
from ..base import DraftSession, Target
from ..copied import plan_session, refuse_copy
from ..second_model import SecondModelSession
from ..stopping import StoppingDrafter

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LayerSkip(StoppingDrafter):
    """Draft with some halves of layers left out."""

    name: ClassVar[str] = "layer-skip"

    attention: tuple[int, ...] = ()
    """Layers whose attention is skipped while drafting, counted from 0."""
    mlp: tuple[int, ...] = ()
    """Layers whose MLP is skipped while drafting, counted from 0."""
    profile: str | None = None
    """A JSON file with both lists of layers, made for this model."""
    strategy: str = "uniform"
    """Layers to skip without lists or profile: uniform (evenly), first, middle, last or random."""
    attention_share: float = 0.2
    """Share of the attention halves that the strategy skips, 0 to 1."""
    mlp_share: float = 0.2
    """Share of the MLP halves that the strategy skips, 0 to 1."""
    seed: int = 0
    """Seed of the random strategy."""
    reuse: bool = True
    """Verify from the draft's states before the first skip. False runs all layers, to compare."""
    vocabulary: int = 0
    """Score only token ids below this (often the frequent ones) and the prompt's tokens. 0 scores
    all, or the part's own vocabulary."""
    sample: bool = False
    """Under sampling, draw drafts at random and verify them by rejection: the same distribution,
    other tokens for a seed. Prompts then add nothing to a shorter vocabulary."""
    part: str | os.PathLike[str] | TrainedPart | None = None
    """Folder of a draft-lora, which says what to skip. Its matrices are on only while drafting."""
    weights: str | None = None
    """Draft with the other layers of a copy in fewer bits: int8, int4, or auto as `quantised` has
    it. Then no states are reused. None drafts with the model's own weights."""

    def __post_init__(self) -> None:
        listed = bool(self.attention or self.mlp)
        if listed and self.profile:
            raise OptionError(
                f"profile {self.profile!r} and lists of layers both say what to skip; give one"
            )
        if listed or self.profile or self.part is not None:  # which no strategy has to choose
            defaults = {field.name: field.default for field in fields(self)}
            for option in ("strategy", "attention_share", "mlp_share", "seed"):
                if (value := getattr(self, option)) != defaults[option]:
                    raise OptionError(
                        f"{option}={value!r} is for a strategy, but layers are given; leave out one"
                    )
        if self.part is not None and (listed or self.profile or self.vocabulary):
            raise OptionError(
                "a part says itself which layers are skipped and which tokens it can say; leave "
                "out lists, profile and vocabulary"
            )
        if self.strategy not in STRATEGIES:
            raise OptionError(
                f"there is no strategy {self.strategy!r}; {nearest(self.strategy, STRATEGIES)}"
            )
        for option in ("attention_share", "mlp_share"):
            if not 0 <= (share := getattr(self, option)) <= 1:
                raise OptionError(
                    f"{option}={share} is no share of the layers; use 0 (none) to 1 (all)"
                )

    def start(self, target: Target) -> DraftSession:
        model = target.model
        model.needs_layers("draft='layer-skip'")
        if self.part is not None:
            refuse_copy(self.weights)
            part = find_part(self.part, "draft-lora", model)
            return self.stopping(_with_lora(target, part, self.sample), model, model.layers)
        plan = LayerPlan.skipping(model.layers, *self.skipped(model.shape))
        if not (plan.skipped_attention or plan.skipped_mlp):
            raise OptionError(
                "nothing is skipped, so the draft would be the whole model and save nothing; name "
                "layers or raise a share"
            )
        model.shape.check_plan(plan)
        how = self.weights, self.vocabulary, self.reuse, self.sample
        return self.stopping(plan_session(target, plan, *how), model, model.layers)

    def skipped(self, shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The layers whose attention and whose MLP are skipped in a model of this shape."""
        if self.profile:
            return read_profile(self.profile, shape)
        if self.attention or self.mlp:
            return self.attention, self.mlp
        choose, dice = STRATEGIES[self.strategy], random.Random(self.seed)
        counts = [round(share * shape.layers) for share in (self.attention_share, self.mlp_share)]
        attention, mlp = (tuple(choose(shape.layers, count, dice)) for count in counts)
        return shape.free_to_skip(attention), mlp


def _with_lora(target: Target, part: TrainedPart, sample: bool) -> SecondModelSession:
    """Draft with a view of the model that has the part's matrices. It computes other states than
    the model, so it has a cache of its own and nothing is reused."""
    view, rows = ready(part, target.model, lora_view), ready(part, target.model, partial_head_of)
    plan = LayerPlan.skipping(view.layers, part.settings["attention"], part.settings["mlp"])
    cache = view.new_cache(target.cache.rows, 1)
    return SecondModelSession(Target(view, cache), rows, plan, sample)


STRATEGIES: Mapping[str, Callable[[int, int, random.Random], Iterable[int]]] = {
    "uniform": lambda layers, count, _: ((2 * i + 1) * layers // (2 * count) for i in range(count)),
    "first": lambda layers, count, _: range(count),
    "middle": lambda layers, count, _: range((layers - count) // 2, (layers + count) // 2),
    "last": lambda layers, count, _: range(layers - count, layers),
    "random": lambda layers, count, dice: sorted(dice.sample(range(layers), count)),
}


def read_profile(path: str, shape: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The attention and MLP layers that a profile skips, which has to be for this family and size.

    {"schema_version": 1, "family": "llama", "layers": 30, "attention": [11, 14], "mlp": [14]}
    """
    if not is_there(Path(path)):
        raise OptionError(
            f"profile {shown(path)} cannot be read (there is no such file); give the path of a "
            "JSON file"
        )
    try:
        profile = from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"profile {path} cannot be read ({error.strerror}); give the path of a JSON file"
        ) from error
    except ValueError as error:
        raise OptionError(
            f"profile {path} is not JSON ({error}); it is truncated, or no profile"
        ) from error
    if not isinstance(profile, dict):
        raise OptionError(
            f"profile {path} holds a JSON {type(profile).__name__} where an object is needed; it "
            "is no profile"
        )
    if (version := profile.get("schema_version")) != SCHEMA_VERSION:
        raise OptionError(
            f"profile {path} has schema_version {version!r}, and this selfspec reads "
            f"{SCHEMA_VERSION}; make it again, or use another selfspec"
        )
    for key, ours in (("family", shape.family), ("layers", shape.layers)):
        if (theirs := profile.get(key)) != ours:
            raise OptionError(
                f"profile {path} was made for a model with {key} {theirs!r}, this one has {ours!r};"
                " use a profile of this model"
            )
    skipped: dict[str, tuple[int, ...]] = {}
    for key in ("attention", "mlp"):
        layers = profile.get(key)
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise OptionError(
                f"profile {path}: {key!r} is {layers!r} where a list of layer numbers is needed; "
                "make the profile again"
            )
        skipped[key] = tuple(layers)
    return skipped["attention"], skipped["mlp"]

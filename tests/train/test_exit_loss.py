"""The exit loss against a plain implementation in float64: value, every gradient, and how much
memory it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from runs import trainable
from torch import Tensor, nn
from torch.nn import functional

from selfspec import OptionError, SelfCheckFailed
from selfspec.errors import UnsupportedModel
from selfspec.model.families import FAMILIES
from selfspec.model.weights import module
from selfspec.testing import tiny_model
from selfspec.train.balance import balance
from selfspec.train.candidates import candidates
from selfspec.train.exit_forward import IGNORED, ExitForward, Moment
from selfspec.train.exit_loss import Exit, Finish, exit_loss
from selfspec.train.recipe import Recipe
from selfspec.train.supported import PROVEN

WIDTH, VOCABULARY = 6, 11


def some(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_value_and_gradients(chunk: int, frozen: bool, bias: bool) -> None:
    """A chunk counted twice or left out, a weight applied to the value and not to the gradient,
    exits that share a gradient."""
    counts, scales = [7, 4, 7], [0.5, 0.2, 0.3]
    weight = some(VOCABULARY, WIDTH).requires_grad_(not frozen)
    offset = some(VOCABULARY, seed=9).requires_grad_(not frozen) if bias else None
    states = [some(n, WIDTH, seed=i).requires_grad_(True) for i, n in enumerate(counts)]
    targets = [tokens(n, seed=i) for i, n in enumerate(counts)]
    exits = [
        Exit(x, y, torch.tensor(s, dtype=torch.float64))
        for x, y, s in zip(states, targets, scales, strict=True)
    ]
    loss, sums = exit_loss(exits, weight, offset, live=chunk * VOCABULARY)
    (3.0 * loss).backward()
    leaves = [
        *states,
        *([] if frozen else [weight]),
        *([offset] if offset is not None and not frozen else []),
    ]
    found = [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]
    for leaf in leaves:
        leaf.grad = None
    each = [
        functional.cross_entropy(functional.linear(x, weight, offset), y, reduction="sum")
        for x, y in zip(states, targets, strict=True)
    ]
    expected = sum(s * one for s, one in zip(scales, each, strict=True))
    (3.0 * expected).backward()  # type: ignore[union-attr]
    assert torch.allclose(loss, expected.detach(), rtol=1e-12)  # type: ignore[union-attr]
    assert torch.allclose(sums, torch.stack(each).detach(), rtol=1e-12)
    for got, leaf in zip(found, leaves, strict=True):
        assert torch.allclose(got, leaf.grad, rtol=1e-10, atol=1e-12)  # type: ignore[arg-type]
    if frozen:
        assert weight.grad is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("finish", [Finish(), Finish(1.7, 2.0)])
def test_some_tokens_stand_for_all(finish: Finish, frozen: bool) -> None:
    """Rows of the head that go astray on their way in or back, and what is counted twice before the
    cap or after it."""
    weight = some(VOCABULARY, WIDTH).requires_grad_(not frozen)
    offset = some(VOCABULARY, seed=9).requires_grad_(not frozen)
    states, target = some(5, WIDTH, seed=1).requires_grad_(True), torch.tensor([7, 2, 7, 9, 2])
    among = candidates(torch.tensor([2, 7, 9]), VOCABULARY, 3, torch.Generator().manual_seed(4))
    assert among is not None and len(among.some.unique()) == 6
    whole = some(4, WIDTH, seed=2).requires_grad_(True)  # another exit, over all of the vocabulary
    one = torch.tensor(0.5, dtype=torch.float64)
    exits = [Exit(states, target, one, among), Exit(whole, tokens(4), one)]
    exit_loss(exits, weight, offset, live=2 * VOCABULARY, finish=finish)[0].backward()
    leaves = [states, whole, *([] if frozen else [weight, offset])]
    found = [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]
    for leaf in leaves:
        leaf.grad = None

    def finished(x: Tensor) -> Tensor:
        logits = functional.linear(x, weight, offset) * finish.scale
        return finish.cap * torch.tanh(logits / finish.cap) if finish.cap else logits

    logits = finished(states)
    drawn = [token for token in among.some.tolist() if token not in (2, 7, 9)]
    known, sampled = logits[:, [2, 7, 9]].exp().sum(1), logits[:, drawn].exp().sum(1)
    loss = (
        (known + sampled * (VOCABULARY - 3) / 3).log() - logits.gather(1, target[:, None])[:, 0]
    ).sum()
    (
        0.5 * (loss + functional.cross_entropy(finished(whole), tokens(4), reduction="sum"))
    ).backward()
    for got, leaf in zip(found, leaves, strict=True):
        assert torch.allclose(got, leaf.grad, rtol=1e-6, atol=1e-7)  # type: ignore[arg-type]


@pytest.mark.parametrize("finish", [Finish(0.4), Finish(cap=1.5), Finish(1.7, 2.0)])
def test_what_follows_the_head(finish: Finish) -> None:
    """A scale or a soft cap that is in the value and not in the gradient, or the other way
    round."""
    states, weight = (
        some(5, WIDTH).requires_grad_(True),
        some(VOCABULARY, WIDTH, seed=1).requires_grad_(True),
    )
    exit_loss(
        [Exit(states, tokens(5), torch.tensor(1.0).double())],
        weight,
        live=2 * VOCABULARY,
        finish=finish,
    )[0].backward()
    found = [states.grad, weight.grad]
    states.grad = weight.grad = None
    logits = states @ weight.T * finish.scale
    logits = finish.cap * torch.tanh(logits / finish.cap) if finish.cap else logits
    functional.cross_entropy(logits, tokens(5), reduction="sum").backward()
    for got, leaf in zip(found, (states, weight), strict=True):
        assert torch.allclose(got, leaf.grad, rtol=1e-10)  # type: ignore[arg-type]


def test_large_logits_do_not_overflow() -> None:
    """exp() of a raw logit; the highest has to be taken off first."""
    states = torch.tensor([[1000.0, -1000.0]], requires_grad=True)
    loss, _ = exit_loss(
        [Exit(states, torch.tensor([1]), torch.tensor(1.0))], torch.eye(2, requires_grad=True)
    )
    loss.backward()
    assert loss.item() == pytest.approx(2000.0)
    assert torch.allclose(states.grad, torch.tensor([[1.0, -1.0]]))  # type: ignore[arg-type]


def test_half_precision_accumulates_in_float32() -> None:
    """A head's gradient summed in bfloat16 over many chunks loses what is added last."""
    states = some(600, WIDTH).bfloat16()
    weight = some(VOCABULARY, WIDTH, seed=1).bfloat16().requires_grad_(True)
    target = tokens(600)
    exit_loss([Exit(states, target, torch.tensor(1.0))], weight, live=VOCABULARY)[0].backward()
    exact = weight.detach().double().requires_grad_(True)
    functional.cross_entropy(states.double() @ exact.T, target, reduction="sum").backward()
    assert torch.allclose(weight.grad.double(), exact.grad, rtol=0.02, atol=0.3)  # type: ignore[union-attr,arg-type]


def test_autocast_reaches_the_head() -> None:
    """A function of one's own is not seen by autocast: the head would run in float32, at several
    times the price on a GPU."""
    states, weight = (
        some(4, WIDTH).float().requires_grad_(True),
        some(VOCABULARY, WIDTH, seed=1).float().requires_grad_(True),
    )
    one = [Exit(states, tokens(4), torch.tensor(1.0))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = exit_loss(one, weight)[0]
    low.backward()
    high = exit_loss(one, weight)[0]
    assert 0 < abs(low.item() - high.item()) < 0.05 * high.item()
    assert states.grad.dtype == weight.grad.dtype == torch.float32  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------- memory


def peak_bytes(work: Callable[[], Tensor]) -> int:
    """The most memory allocated at a time, forward and backward, by torch's own account of every
    allocation."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work().backward()
    events = [
        each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"
    ]  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert peak > 0, "the profiler saw no allocation, so this measures nothing"
    return peak


def test_memory_does_not_grow_with_the_exits() -> None:
    """All exits' logits alive at once: at 30 exits and a vocabulary of 49k that is 6 MB a
    position."""
    rows, width, vocabulary = 64, 8, 4096
    chunk = 8 * vocabulary
    weight = torch.randn(vocabulary, width, requires_grad=True)
    states = [torch.randn(rows, width, requires_grad=True) for _ in range(12)]
    target = torch.randint(0, vocabulary, (rows,))

    def ours(count: int) -> Tensor:
        return exit_loss(
            [Exit(x, target, torch.tensor(1.0)) for x in states[:count]], weight, live=chunk
        )[0]

    def naive(count: int) -> Tensor:
        return torch.stack(
            [functional.cross_entropy(x @ weight.T, target) for x in states[:count]]
        ).sum()

    two, twelve = peak_bytes(lambda: ours(2)), peak_bytes(lambda: ours(12))
    each = rows * width * 4  # the gradient of one more exit's states, which has to be kept
    assert twelve - two <= 10 * 3 * each + 4096, f"{two} bytes for 2 exits, {twelve} for 12"
    assert twelve < 4 * (chunk + vocabulary * width) * 4, (
        "more than a few chunks of logits and gradients of the head"
    )
    assert peak_bytes(lambda: naive(12)) > 3 * peak_bytes(lambda: naive(2)), (
        "the measurement does not see logits"
    )


# --------------------------------------------------------------------------------- on a whole model


def naive_loss(
    model: Any, ids: Tensor, labels: Tensor, weights: dict[int, float], mask: Tensor | None = None
) -> Tensor:
    """J as the paper writes it: all logits of all exits, from transformers' own hidden states;
    scale and cap written out."""
    family, config = FAMILIES[model.config.model_type], model.config
    decoder, final_norm = model.base_model, module(model, family.final_norm)
    out = decoder(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True)
    total = torch.zeros((), dtype=torch.float64)
    for layer, weight in weights.items():
        last = layer == len(out.hidden_states) - 2
        states = out.last_hidden_state if last else final_norm(out.hidden_states[layer + 1])
        logits = module(model, family.head)(states[:, :-1])
        logits = logits * getattr(config, "logit_scale", 1) / getattr(config, "logits_scaling", 1)
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        total = total + weight * functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
    if family.experts:  # what transformers adds, where it is asked for
        out = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
        total = total + config.router_aux_loss_coef * out.aux_loss
    return total


VARIANTS = [
    ("qwen3_moe", True, True),
    ("llama", True, False),
    ("llama", True, True),
    ("gemma2", False, True),
    ("gpt2", False, True),
]


@pytest.mark.parametrize(
    ("family", "tied", "checkpointing"), [*((family, False, False) for family in PROVEN), *VARIANTS]
)
def test_whole_model_in_float64(family: str, tied: bool, checkpointing: bool) -> None:
    """States of the wrong layer, a norm taken twice or not at all, labels shifted twice, masked
    labels that count, a family's scale or soft cap left out of the value or of the gradient."""
    model = (
        trainable(family, seed=5, tie_word_embeddings=tied).double().requires_grad_(True).train()
    )
    ids = torch.randint(3, 250, (3, 10), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :6] = IGNORED
    recipe = Recipe(dropout=0.0, exit_scale=0.5, curriculum="all")
    expected = naive_loss(model, ids, labels, recipe.exit_weights(4, 0, 1))
    expected.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    forward = ExitForward(model, recipe, live=7 * 259)
    with forward.installed():
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-6 if FAMILIES[family].experts else 1e-10)
    # transformers computes such norms, and experts' weights, in float32 whatever the model is in
    wide = FAMILIES[family].norms.wide or FAMILIES[family].experts
    near = {"rtol": 1e-4, "atol": 1e-6} if wide else {"rtol": 1e-7, "atol": 1e-10}
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name], **near), name
    assert "forward" not in vars(model)
    assert torch.isfinite(model(input_ids=ids).logits).all(), "the model's own forward is back"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_kept_busy_as_transformers_keeps_them(family: str) -> None:
    """A loss of the chosen experts alone, without their chances; tokens that fill a text up; one
    that counts in every micro-batch as if it were the step."""
    model = trainable(family, seed=5, router_aux_loss_coef=0.5).train()
    ids = torch.randint(3, 250, (3, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    plain = Recipe(dropout=0.0, exit_scale=0.0)
    expected = naive_loss(model, ids, ids, {3: 1.0}, mask)
    given = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    with (forward := ExitForward(model, plain)).installed():
        loss = model(**given).loss
        forward.moment = Moment(0, 1, tokens=4 * 3 * 11)  # a quarter of a step
        quarter = model(**given).loss
    model.config.router_aux_loss_coef = 0.0
    with ExitForward(model, plain).installed():
        without = model(**given).loss
    assert torch.allclose(loss.double(), expected, rtol=1e-5)
    assert loss - without > 0.3, "the loss says nothing, so agreement would mean nothing"
    assert torch.allclose(4 * quarter, loss, rtol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_layers_that_a_sample_skips_balance_nothing(family: str) -> None:
    """Tokens of one row weighed by another row's mask, or counted where no router saw them. The
    reference: each row by itself through the layers that it runs."""
    model = trainable(family, seed=5, router_aux_loss_coef=0.5).train()
    ids = torch.randint(3, 250, (3, 12), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    keep = torch.tensor([[1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    forward, alone = ExitForward(model, Recipe(dropout=0.4)), dict[int, list[Tensor]]()

    def run(rows: slice) -> None:
        forward.dropout.set(keep[:, rows])
        forward._run(ids[rows], mask[rows], frozenset())

    with forward.installed():
        run(slice(None))
        found = forward.balance.loss(mask, forward.dropout.kept)
        for row in range(3):
            run(slice(row, row + 1))
            for layer, logits in forward.balance._logits.items():
                alone.setdefault(layer, []).append(logits[mask[row].bool()])
    together = {layer: torch.cat(rows) for layer, rows in alone.items()}
    seen = {layer: torch.ones(len(logits)) for layer, logits in together.items()}
    assert torch.allclose(found, balance(together, seen, model.config.num_experts_per_tok))
    assert 2 not in together, "nobody ran it"
    keep[:] = False
    with forward.installed():
        run(slice(None))
    assert forward.balance.loss(mask, forward.dropout.kept) == 0


def test_what_fills_blocks_up_is_not_computed() -> None:
    """Layers run on columns in which nothing is trained; or a column too many taken off, and with
    it the last trained token."""
    model = tiny_model(seed=5).requires_grad_(True).train()
    ids = torch.randint(3, 250, (3, 12), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[:, 7:] = IGNORED
    labels[1, 5:] = IGNORED
    seen: list[int] = []
    model.model.layers[0].register_forward_hook(
        lambda layer, given, output: seen.append(output.shape[1])
    )
    forward = ExitForward(model, Recipe(dropout=0.0, curriculum="all"))
    expected = naive_loss(model, ids, labels, forward.recipe.exit_weights(forward.depth, 0, 1))
    with forward.installed():
        loss = model(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids)).loss
        nothing = model(input_ids=ids, labels=torch.full_like(ids, IGNORED)).loss
    assert torch.allclose(loss.double(), expected, rtol=1e-5)
    assert seen == [12, 7, 12] and nothing.item() == 0


def at_each_step(
    forward: ExitForward, ids: Tensor, steps: int
) -> list[tuple[Tensor, dict[int, Tensor]]]:
    """The loss of one text, and each exit's, at every step of a run."""
    found = []
    with forward.installed():
        for step in range(steps):
            forward.moment = Moment(step, steps)
            found.append((forward.model(input_ids=ids, labels=ids).loss, dict(forward.sums)))
    return found


def test_a_share_stands_for_all_positions() -> None:
    """A share of half the positions that halves the early exits' weight, or that thins out the last
    layer's loss too."""
    model = tiny_model(seed=5).train()
    ids = torch.randint(3, 250, (4, 65), generator=torch.Generator().manual_seed(2))
    whole = ExitForward(model, Recipe(dropout=0.0, curriculum="all"))
    part = ExitForward(model, Recipe(dropout=0.0, curriculum="all", share=0.5))
    with whole.installed():
        exact = model(input_ids=ids, labels=ids).loss, dict(whole.sums)
    drawn = at_each_step(part, ids, 30)
    assert all(torch.equal(sums[3], exact[1][3]) for _, sums in drawn), (
        "the last layer is trained at all positions"
    )
    assert len({float(sums[1]) for _, sums in drawn}) == 30, "positions are drawn anew each step"
    mean = torch.stack([loss for loss, _ in drawn]).mean()
    assert torch.allclose(mean, exact[0], rtol=0.02)


def test_others_stand_for_the_rest_of_the_vocabulary() -> None:
    """Tokens drawn once and for all, an estimate of the loss that is off, or a last layer that is
    asked about some only."""
    model = tiny_model(seed=5).train()
    ids = torch.randint(3, 60, (4, 65), generator=torch.Generator().manual_seed(2))
    whole = ExitForward(model, Recipe(dropout=0.0, curriculum="all"))
    part = ExitForward(model, Recipe(dropout=0.0, curriculum="all", exit_others=40))
    with whole.installed():
        model(input_ids=ids, labels=ids)
        exact = dict(whole.sums)
    drawn = [sums for _, sums in at_each_step(part, ids, 40)]
    assert all(torch.equal(sums[3], exact[3]) for sums in drawn), (
        "the last layer chooses among all tokens"
    )
    assert len({float(sums[1]) for sums in drawn}) == 40, "others are drawn anew each step"
    for layer in (1, 2):
        assert torch.stack([sums[layer] for sums in drawn]).mean().item() == pytest.approx(
            exact[layer].item(), rel=0.01
        )
    with part.installed():
        model.eval()
        model(input_ids=ids, labels=ids)
    assert set(part.sums) == {3}


@pytest.mark.parametrize("family", PROVEN)
def test_out_of_training_the_loss_is_the_models_own(family: str) -> None:
    """Evaluation with dropped layers or weighted exits would not be comparable with anything; the
    last exit is the model."""
    model = trainable(family, seed=5)
    ids = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(2))
    own = model(input_ids=ids, labels=ids).loss
    forward = ExitForward(model, Recipe(dropout=0.9))
    with forward.installed():
        assert torch.allclose(model(input_ids=ids, labels=ids).loss, own, rtol=1e-5)
    forward.check(ids[0])


def test_a_head_that_is_not_plain_is_refused() -> None:
    """Logits that are capped or scaled after the head would be trained as something else; a wrapped
    head has no one weight."""
    model = tiny_model(seed=5)
    head = model.lm_head
    model.lm_head = nn.Sequential(head)
    with pytest.raises(OptionError, match="head is a Sequential"):
        ExitForward(model, Recipe())
    model.lm_head = head
    forward = ExitForward(model, Recipe())
    own = model.forward
    model.forward = lambda **given: type("Out", (), {"logits": own(**given).logits * 0.5})()  # type: ignore[assignment]
    with pytest.raises(SelfCheckFailed, match="differs from this llama model's own logits"):
        forward.check(torch.arange(6))


def test_families_without_proof_are_refused() -> None:
    """Experts that nothing keeps busy, trained without a word."""
    with pytest.raises(UnsupportedModel, match="for training"):
        ExitForward(tiny_model("lfm2_moe"), Recipe())

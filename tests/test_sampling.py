"""Sampling against transformers' own warpers, the statistics of the counter-based randomness, and
bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.core.logprobs import logprobs_of
from selfspec.core.randomness import uniform
from selfspec.core.sampling import Sampler, SamplingParams, row_samplers
from selfspec.errors import ModelError, OptionError

INFINITY = math.inf


def some_logits(
    rows: int, vocabulary: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype)


def reference(
    params: SamplingParams, row: Tensor, context: list[int], extra: LogitsProcessor | None = None
) -> Tensor:
    """What transformers' generate makes of one row, (vocab,)."""
    steps = LogitsProcessorList()
    if params.logit_bias:
        steps.append(
            SequenceBiasLogitsProcessor(
                [[[token], float(bias)] for token, bias in params.logit_bias.items()]
            )
        )
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if extra is not None:
        steps.append(extra)
    if not params.greedy:
        steps.append(TemperatureLogitsWarper(float(params.temperature)))
        if params.top_k:
            steps.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            steps.append(TopPLogitsWarper(float(params.top_p)))
        if params.min_p:
            steps.append(MinPLogitsWarper(float(params.min_p)))
    return steps(torch.LongTensor([context]), cast(torch.FloatTensor, row[None].float()))[0]


class Favour(LogitsProcessor):
    """Adds to the token after the last one, and writes into its argument, which HF allows."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, (input_ids[0, -1] + 1) % scores.shape[1]] += 5.0 + 0.01 * input_ids.shape[1]
        return scores


class BanAll(LogitsProcessor):
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return cast(torch.FloatTensor, torch.full_like(scores, -INFINITY))


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.3, "top_k": 40},
    {"temperature": 1.3, "top_k": 1},
    {"temperature": 0.9, "top_k": 10**6},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.5, "top_p": 0.95},
    {"temperature": 0.6, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.8, "min_p": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.8},
    {"temperature": 1.1, "top_k": 30, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.3},
    {
        "temperature": 0.7,
        "repetition_penalty": 0.8,
        "top_k": 20,
        "logit_bias": {0: 3.5, 17: -100.0, 3: 0.25},
    },
]


@pytest.mark.parametrize("vocabulary", [100, 20_000])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_equal_transformers(options: dict[str, Any], vocabulary: int) -> None:
    """Catches a filter with another rule or in another place than HF's: both the kept tokens and
    their values must be equal. 20,000 is large enough for the selection that spares the full
    sort."""
    params = SamplingParams(**options)
    logits = some_logits(6, vocabulary)
    contexts = [[3, 17, 17, 5 + i] for i in range(6)]
    ours = Sampler(params, seed=1).process(logits, contexts)
    for i, context in enumerate(contexts):
        assert torch.equal(ours[i], reference(params, logits[i], context)), (
            f"row {i} differs from transformers"
        )


@pytest.mark.parametrize("vocabulary", [64, 20_000])
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters_equal_transformers_with_ties(options: dict[str, Any], vocabulary: int) -> None:
    """Catches ties cut differently at the border of top-k or top-p; bfloat16 logits rounded to
    quarters are full of them. How many of equal tokens top-p keeps is HF's rule; which ones is
    arbitrary there (an unstable sort), and the first here."""
    params = SamplingParams(**options)
    unfiltered = replace(params, top_k=0, top_p=1.0, min_p=0.0)
    logits = ((some_logits(4, vocabulary, seed=3) * 4).round() / 4).to(torch.bfloat16)
    contexts = [[1, 2, 60]] * 4
    ours = Sampler(params, seed=1).process(logits, contexts)
    for i, context in enumerate(contexts):
        expected = reference(params, logits[i], context)
        kept = ours[i].isfinite()
        assert torch.equal(ours[i].sort().values, expected.sort().values), (
            f"row {i}: other values are kept"
        )
        border = ours[i][kept].min()
        assert torch.equal(ours[i] > border, expected > border), (
            f"row {i}: another token above the border is kept"
        )
        processed = reference(unfiltered, logits[i], context)
        tied = kept[processed == border].tolist()
        assert tied == sorted(tied, reverse=True), (
            f"row {i}: of equal tokens not the first are kept"
        )


@pytest.mark.parametrize("temperature", [0.05, 1.0, 30.0])
def test_top_p_at_every_width(temperature: float) -> None:
    """Catches a selection that stops too early: at temperature 30 top-p needs nearly all of the
    vocabulary, more than any first guess, at 0.05 a single token."""
    params = SamplingParams(temperature=temperature, top_p=0.9)
    logits = some_logits(2, 20_000, seed=5)
    ours = Sampler(params, seed=1).process(logits, [[1]] * 2)
    kept = ours.isfinite().sum(-1)
    expected = torch.stack([reference(params, row, [1]).isfinite() for row in logits]).sum(-1)
    assert (kept - expected).abs().max() <= 1, "more than rounding at the border differs"
    mass = [
        float((row / temperature).double().softmax(-1)[mine.isfinite()].sum())
        for row, mine in zip(logits, ours, strict=True)
    ]
    assert all(m >= 0.9 - 1e-6 for m in mass), mass


def test_dividing_may_create_ties_at_the_border_of_top_k() -> None:
    """Catches top-k chosen before the temperature: two neighbouring floats become equal when
    divided, and HF keeps both."""
    low = torch.tensor(1.8)
    for _ in range(1000):
        high = torch.nextafter(low, torch.tensor(2.0))
        if low / 1.7 == high / 1.7:
            break
        low = high
    assert low < high and low / 1.7 == high / 1.7
    logits = torch.cat([torch.stack([low, high]), torch.linspace(-5, 0, 30)])[None]
    params = SamplingParams(temperature=1.7, top_k=1)
    ours = Sampler(params, seed=1).process(logits, [[0]])
    assert ours.isfinite().sum() == 2
    assert torch.equal(ours[0], reference(params, logits[0], [0]))


def test_users_processors_come_after_the_penalties_and_before_temperature() -> None:
    """Catches a processor called at another place, with only the last token, or on the caller's own
    logits."""
    params = SamplingParams(temperature=0.5, top_k=4, repetition_penalty=1.5, logit_bias={7: 2.0})
    logits = some_logits(3, 50, seed=8)
    before = logits.clone()
    contexts = [[7, 8, 9], [7, 8, 9, 10], [7, 8, 9, 10, 49]]
    ours = Sampler(params, seed=1, processors=[Favour()], prompt_length=2).process(logits, contexts)
    for i, context in enumerate(contexts):
        assert torch.equal(ours[i], reference(params, logits[i], context, Favour())), f"row {i}"
    assert torch.equal(logits, before), "a processor wrote into the model's logits"


def test_presence_and_frequency_count_the_output_only() -> None:
    """Catches the prompt being counted, a presence penalty applied per occurrence, and a frequency
    penalty applied once."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    logits = some_logits(2, 10)
    ours = Sampler(params, prompt_length=3).process(logits, [[1, 1, 2], [1, 1, 2, 2, 4, 4, 4]])
    expected = logits.clone()
    expected[1, 2] -= 0.5 + 0.25
    expected[1, 4] -= 0.5 + 3 * 0.25
    torch.testing.assert_close(ours, expected)


def test_ends_that_come_too_early_cannot_be_chosen() -> None:
    """An answer that ends at once although a least length was asked for, or never ends after it."""
    logits, prompt, ends = some_logits(1, 12), [3, 4, 5], [2, 7]
    logits[0, 7] = 50  # wants to end
    params = SamplingParams(min_new_tokens=2)
    sampler = Sampler(params, prompt_length=len(prompt), ends=ends)
    theirs = MinNewTokensLengthLogitsProcessor(3, 2, ends, device="cpu")
    for new in range(4):
        context = [*prompt, *[1] * new]
        expected = theirs(torch.tensor([context]), logits.clone())
        assert torch.equal(sampler.process(logits, [context]), expected), new
    assert not sampler.plain and Sampler(params).plain, "without ends there is nothing to keep away"


def test_penalties_ignore_ids_beyond_the_head() -> None:
    """Catches an index error where the embedding has more rows than the head, as HF's penalty
    allows."""
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0)
    logits = some_logits(1, 10)
    ours = Sampler(params).process(logits, [[3, 12]])
    expected = reference(SamplingParams(repetition_penalty=2.0), logits[0], [3, 12])
    expected[3] -= 1.0
    assert torch.equal(ours[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [*FILTERS, {}, {"presence_penalty": 1.0}], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Catches any operation whose bits change with the number of rows processed together, or that
    writes into its input."""
    sampler = Sampler(
        SamplingParams(**options),
        seed=11,
        processors=[Favour()] if len(options) == 3 else (),
        prompt_length=1,
    )
    logits = some_logits(8, 5000, seed=2, dtype=dtype)
    before = logits.clone()
    contexts = [[1, 2, 3, *range(i)] for i in range(8)]
    positions = list(range(3, 11))
    alone = [
        (
            sampler.process(logits[i : i + 1], contexts[i : i + 1]),
            sampler.probabilities(logits[i : i + 1], contexts[i : i + 1]),
            sampler.choose(logits[i : i + 1], contexts[i : i + 1], positions[i : i + 1]),
        )
        for i in range(8)
    ]
    for n in range(1, 9):
        together = (
            sampler.process(logits[:n], contexts[:n]),
            sampler.probabilities(logits[:n], contexts[:n]),
            sampler.choose(logits[:n], contexts[:n], positions[:n]),
        )
        for name, many, ones in zip(
            ("process", "probabilities", "choose"), together, zip(*alone, strict=True), strict=True
        ):
            assert torch.equal(many, torch.cat(ones[:n])), (
                f"{name} of {n} rows is not that of each row alone"
            )
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0}, {"temperature": 1.5, "top_p": 0.9}, {"temperature": 1.5, "top_k": 30}],
    ids=str,
)
def test_choose_draws_from_probabilities(options: dict[str, Any]) -> None:
    """Catches choose and probabilities going apart (then verification would keep another
    distribution than it promises): a chi-square over 20,000 positions. The same counts must fail
    against another temperature, or the test could not fail."""
    params = SamplingParams(**options)
    sampler = Sampler(params, seed=4)
    logits = some_logits(1, 12, seed=6) / 3
    n = 20_000
    drawn = sampler.choose(logits.expand(n, -1), [[0]] * n, range(n))
    counts = drawn.bincount(minlength=12).double()

    def chi_square(probabilities: Tensor) -> float:
        expected = probabilities[0].double() * n
        assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
        kept = expected > 0
        return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())

    # 11 degrees of freedom: 2e-4 chance for a right sampler
    assert chi_square(sampler.probabilities(logits, [[0]])) < 35
    warmer = SamplingParams(temperature=params.temperature * 1.1)
    assert chi_square(Sampler(warmer, seed=4).probabilities(logits, [[0]])) > 60, (
        "the test cannot see a 10% warmer distribution"
    )


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1.0, "top_k": 20}, {"temperature": 1.0, "top_p": 0.7}, {"temperature": 0.8}],
    ids=str,
)
def test_what_is_filtered_out_changes_no_other_draw(options: dict[str, Any]) -> None:
    """Catches draws that depend on where a token stands among those that are left: a draft with
    other filters or fewer tokens would be coupled with other numbers than the target."""
    logits = some_logits(1, 300, seed=9) / 2
    sampler = Sampler(SamplingParams(**options), seed=0)
    whole = Sampler(SamplingParams(temperature=1.0), seed=0)
    dense = sampler.process(logits, [[0]])
    tokens = sampler.choose(logits.expand(200, -1), [[0]] * 200, range(200))
    assert torch.equal(tokens, whole.choose(dense.expand(200, -1), [[0]] * 200, range(200)))
    assert len(tokens.unique()) > 10


@pytest.mark.parametrize("size", [1000, 5000])
def test_a_token_of_probability_zero_is_never_chosen(size: int) -> None:
    """Catches a filtered token whose number wins, where few tokens are left and where many are."""
    logits = some_logits(1, size, seed=1)
    logits[0, : size // 3] = logits[0, -size // 3 :] = -INFINITY
    for options in (
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 0.7, "top_p": 0.5},
    ):
        sampler = Sampler(SamplingParams(**options), seed=0)  # type: ignore[arg-type]
        tokens = sampler.choose(logits.expand(100, -1), [[0]] * 100, range(100))
        assert bool((sampler.probabilities(logits, [[0]])[0, tokens] > 0).all())


def test_greedy() -> None:
    """Catches greedy decoding that takes the last of equal logits, a distribution that is not a
    point mass, or penalties that are ignored because the choice is an argmax."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 2.5, 0.0, 0.0]])
    plain = Sampler(SamplingParams())
    assert plain.plain
    assert plain.choose(logits, [[0]] * 2, [1, 2]).tolist() == [1, 0]
    assert plain.probabilities(logits, [[0]] * 2).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert plain.process(logits, [[0]] * 2).data_ptr() == logits.data_ptr(), (
        "plain greedy decoding copied the logits"
    )
    penal = Sampler(SamplingParams(frequency_penalty=1.0))
    assert not penal.plain
    assert penal.choose(logits, [[1], [0, 0]], [1, 2]).tolist() == [3, 1]
    assert penal.probabilities(logits, [[1], [0, 0]]).tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 1.0},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 1.0},
        {"logit_bias": {0: 1}},
    ],
)
def test_only_unchanged_greedy_is_plain(option: dict[str, Any]) -> None:
    """Catches the engine's argmax shortcut being taken where something changes the logits."""
    assert not Sampler(SamplingParams(**option)).plain
    assert not Sampler(SamplingParams(), processors=[Favour()]).plain


def test_tokens_depend_on_seed_and_position_only() -> None:
    """Catches a hidden generator state: asking twice, in another order, or from another sampler
    must give the same tokens."""
    logits = some_logits(1, 50).expand(30, -1)
    params = SamplingParams(temperature=3.0, seed=5)
    tokens = Sampler(params).choose(logits, [[0]] * 30, range(30))
    sampler = Sampler(params)
    backwards = [int(sampler.choose(logits[:1], [[0]], [p])) for p in reversed(range(30))]
    assert backwards[::-1] == tokens.tolist()
    assert Sampler(params, seed=6).choose(logits, [[0]] * 30, range(30)).tolist() != tokens.tolist()
    assert Sampler(params, seed=6).seed == 6
    assert len(set(tokens.tolist())) > 5


def test_without_a_seed_one_is_drawn_and_reported() -> None:
    """Catches a fixed default seed, and a reported seed that does not repeat the run."""
    params = SamplingParams(temperature=2.0)
    first, second = Sampler(params), Sampler(params)
    assert first.seed != second.seed
    logits = some_logits(20, 100)
    args = (logits, [[0]] * 20, range(20))
    assert torch.equal(first.choose(*args), Sampler(params, seed=first.seed).choose(*args))


# --------------------------------------------------------------------------------------- randomness


def bins_chi_square(numbers: list[float], bins: int = 50) -> float:
    counts = [0] * bins
    for x in numbers:
        counts[int(x * bins)] += 1
    expected = len(numbers) / bins
    return sum((c - expected) ** 2 / expected for c in counts)


SEQUENCES: dict[str, Callable[[int], float]] = {
    "positions": lambda i: uniform(1, i),
    "seeds": lambda i: uniform(i, 7),
    "streams": lambda i: uniform(1, 7, i),
    "diagonal": lambda i: uniform(i, i),
    "large": lambda i: uniform((1 << 63) - 1 - i, (1 << 31) + i),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_uniform_is_uniform(name: str) -> None:
    """Catches a mix that leaves structure along one argument: mean, variance, 50 bins, correlation
    of neighbours."""
    numbers = [SEQUENCES[name](i) for i in range(10_000)]
    assert all(0 <= x < 1 for x in numbers)
    mean = sum(numbers) / len(numbers)
    assert abs(mean - 0.5) < 4 * math.sqrt(1 / 12 / len(numbers))
    # 49 degrees of freedom; too even would be as wrong as uneven
    assert 20 < bins_chi_square(numbers) < 90
    for lag in (1, 2, 8):
        pairs = list(zip(numbers, numbers[lag:], strict=False))
        correlation = 12 * sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
        assert abs(correlation) < 4 / math.sqrt(len(pairs)), f"lag {lag}: {correlation}"
    low_bits = [x * 2**40 % 1 for x in numbers]
    assert bins_chi_square(low_bits) < 90, "the low bits have structure"


def test_seed_position_and_stream_are_not_interchangeable() -> None:
    """Catches arguments that are merely added or xor-ed: rows with seeds 1, 2, 3 would share
    shifted copies of one sequence."""
    grid = {uniform(s, p, t) for s in range(20) for p in range(20) for t in range(5)}
    assert len(grid) == 20 * 20 * 5
    a, b = [uniform(1, p) for p in range(3000)], [uniform(2, p) for p in range(3000)]
    correlation = 12 * sum((x - 0.5) * (y - 0.5) for x, y in zip(a, b, strict=True)) / 3000
    assert abs(correlation) < 4 / math.sqrt(3000)


def test_uniform_is_stable_across_versions() -> None:
    """Catches a silent change of the sequence, which would change what every published seed
    gives."""
    assert [uniform(0, 0), uniform(1, 5), uniform(1, 5, 1)] == STABLE


STABLE = [0.13870941014555427, 0.1883616826608545, 0.9553558780074289]


# ----------------------------------------------------------------------------------------- for rows


def test_one_params_for_many_rows_uses_consecutive_seeds() -> None:
    """Catches all rows getting the same seed (identical prompts would get identical answers)."""
    samplers = row_samplers(SamplingParams(temperature=1.0, seed=40), [[1], [1, 2], [3]], ())
    assert [s.seed for s in samplers] == [40, 41, 42]
    assert [s.prompt_length for s in samplers] == [1, 2, 1]
    unseeded = [s.seed for s in row_samplers(SamplingParams(temperature=1.0), [[1], [1]])]
    assert unseeded[0] != unseeded[1]


def test_a_list_of_params_goes_row_by_row() -> None:
    """Catches a list whose order or seeds are changed, or that is silently cut to the number of
    rows."""
    params = [SamplingParams(temperature=1.0, seed=9), SamplingParams()]
    samplers = row_samplers(params, [[1], [2]])
    assert [s.params for s in samplers] == params
    assert samplers[0].seed == 9
    with pytest.raises(OptionError, match="sampling has 2 entries for 3 prompts"):
        row_samplers(params, [[1], [2], [3]])
    with pytest.raises(OptionError, match="no SamplingParams"):
        row_samplers([{"temperature": 1}], [[1]])  # type: ignore[list-item]


def test_no_sampling_is_plain_greedy() -> None:
    """Catches a default that samples."""
    assert all(s.plain for s in row_samplers(None, [[1], [2]]))


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    """Catches log-probabilities of processed logits, wrong rows, or alternatives out of order."""
    logits = some_logits(3, 40, dtype=torch.bfloat16)
    tokens = [5, 0, 39]
    expected = logits.float().log_softmax(-1)
    for i, result in enumerate(logprobs_of(logits, tokens, 4)):
        assert result.token == tokens[i]
        assert result.logprob == expected[i, tokens[i]].item()
        best = expected[i].sort(descending=True)
        assert list(result.top.values()) == best.values[:4].tolist()
        assert all(expected[i, t].item() == p for t, p in result.top.items())
    assert [r.top for r in logprobs_of(logits, tokens, 0)] == [{}, {}, {}]
    assert len(logprobs_of(logits, tokens, 99)[0].top) == 40
    assert logprobs_of(logits[:0], [], 3) == []


# ---------------------------------------------------------------------------------------- bad input

BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature=-0.1.*at least 0"),
    ({"temperature": math.nan}, "temperature=nan is not a finite number"),
    ({"temperature": INFINITY}, "temperature=inf"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"temperature": True}, "temperature=True"),
    ({"temperature": 1e-9}, "temperature=1e-09 is below"),
    ({"temperature": 1, "top_k": -1}, "top_k=-1"),
    ({"temperature": 1, "top_k": 2.5}, "top_k=2.5 is not a whole number"),
    ({"temperature": 1, "top_p": 0.0}, "top_p=0.0.*above 0 and at most 1"),
    ({"temperature": 1, "top_p": 1.01}, "top_p=1.01"),
    ({"temperature": 1, "min_p": -0.1}, "min_p=-0.1"),
    ({"temperature": 1, "min_p": 1.1}, "min_p=1.1"),
    ({"repetition_penalty": 0}, "repetition_penalty=0.*at least 1e-06"),
    ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0"),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1.*at most 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1.*at least -2"),
    ({"temperature": 1, "seed": 1.0}, "seed=1.0"),
    ({"temperature": 1, "seed": True}, "seed=True"),
    ({"temperature": 1, "seed": -1}, "seed=-1"),
    ({"temperature": 1, "seed": 1 << 63}, "from 0 to 2"),
    ({"logit_bias": {-1: 1.0}}, "key -1"),
    ({"logit_bias": {"a": 1.0}}, "key 'a'"),
    ({"logit_bias": {1: -INFINITY}}, r"logit_bias\[1\]=-inf"),
    ({"logit_bias": [1, 2]}, "is not a mapping"),
    ({"top_k": 5}, "ignores top_k=5"),
    ({"top_p": 0.9, "seed": 3}, "ignores top_p=0.9, seed=3"),
    ({"seed": 0}, "ignores seed=0"),
    ({"min_p": 0.1}, "set a temperature above 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_bad_values_are_refused(options: dict[str, Any], message: str) -> None:
    """Catches a wrong or contradictory value that is accepted and silently does something else."""
    with pytest.raises(OptionError, match=message):
        SamplingParams(**options)


def test_options_by_name() -> None:
    """Catches unknown names being swallowed, and JSON's string keys being refused."""
    params = SamplingParams.from_options({"temperature": 0.5, "top_k": 3, "logit_bias": {"12": -5}})
    assert params == SamplingParams(temperature=0.5, top_k=3, logit_bias={12: -5})
    with pytest.raises(
        OptionError, match="unknown sampling option 'temprature': did you mean 'temperature'"
    ):
        SamplingParams.from_options({"temprature": 0.5})


def test_params_are_values() -> None:
    """Catches a shared, mutable bias: changing the caller's dictionary afterwards must not change
    frozen parameters."""
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_nothing_left_to_choose_from(temperature: float, options: dict[str, Any]) -> None:
    """Catches token 0 (or an obscure index error) where processors ban everything or the model
    computed NaN."""
    if temperature == 0 and options:
        options = {"repetition_penalty": 1.1}
    params = SamplingParams(temperature=temperature, **options)
    logits = some_logits(1, 10)
    with pytest.raises(OptionError, match="no token is left to choose from after BanAll"):
        Sampler(params, seed=1, processors=[BanAll()]).choose(logits, [[0]], [1])
    logits[0, 3] = math.nan
    processors = [Favour()]  # makes greedy go through the pipeline
    with pytest.raises(ModelError, match="not finite"):
        Sampler(params, seed=1, processors=processors).choose(logits, [[0]], [1])


def test_bias_beyond_the_vocabulary() -> None:
    """Catches an index error, or worse a silent one, for a token the model does not have."""
    with pytest.raises(OptionError, match="names token 10, but the vocabulary ends at 9"):
        Sampler(SamplingParams(logit_bias={10: 1.0})).choose(some_logits(1, 10), [[0]], [1])


def test_a_processor_must_keep_the_shape() -> None:
    """Catches a processor whose result would be broadcast."""

    class Wrong(LogitsProcessor):
        def __call__(
            self, input_ids: torch.LongTensor, scores: torch.FloatTensor
        ) -> torch.FloatTensor:
            return scores[0]  # type: ignore[return-value]

    with pytest.raises(OptionError, match="logits processor Wrong made scores of shape"):
        Sampler(SamplingParams(), processors=[Wrong()]).choose(some_logits(1, 10), [[0]], [1])

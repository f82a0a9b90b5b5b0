"""The loop, with the public fake drafter: whatever is drafted, what is written stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from selfspec import OptionError, PromptError, SamplingParams, ScriptedDrafter
from selfspec.core.contract import Budget, Draft
from selfspec.core.tree import Tree
from selfspec.draft.base import Drafter, DraftSession
from selfspec.engine import generation as engine_module
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_llm
from selfspec.verify.outright import accepted_path

PROMPTS = [
    list(b"once upon a time"),
    list(b"the"),
    list(b"a longer prompt, to be read with the other two"),
]
SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=3)
PENALISED = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(seed=4)


def plain(llm, prompts=PROMPTS, **options):
    return [
        result.tokens
        for result in llm.generate(
            prompts, **{"max_new_tokens": 40, "eos": [], "draft": None, **options}
        )
    ]


def test_accepted_path_follows_the_choices():
    """An off-by-one at the first disagreement or at full agreement, or a tree walked into a branch
    that was not chosen."""
    assert accepted_path(Tree.chain(3), [7]) == [0]
    assert accepted_path(Tree.chain(3, [7, 8]), [7, 9, 8]) == [0, 1]
    assert accepted_path(Tree.chain(3, [7, 8]), [7, 8, 9]) == [0, 1, 2]
    assert accepted_path(Tree.chain(3, [1, 8]), [7, 8, 9]) == [0]
    tree = Tree([3, 5, 6, 7, 8, 9, 5], [-1, 0, 0, 1, 2, 2, 5])
    assert accepted_path(tree, [6, 7, 9, 0, 0, 5, 0]) == [0, 2, 5, 6]
    assert accepted_path(tree, [5, 8, 9, 0, 0, 5, 0]) == [0, 1]


@pytest.mark.parametrize(
    "sampling", [None, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
@pytest.mark.parametrize("wrong_every", [0, 1, 2, 3], ids=["right", "wrong", "half", "third"])
@pytest.mark.parametrize("draft_tokens", [0, 1, 2, 7])
def test_drafts_do_not_change_what_is_written(llm, sampling, wrong_every, draft_tokens):
    """The project's promise. Any leak of a rejected draft into cache, penalties or randomness
    breaks it."""
    expected = plain(llm, sampling=sampling)
    drafter = ScriptedDrafter(expected, wrong_every)
    results = llm.generate(
        PROMPTS,
        sampling=sampling,
        max_new_tokens=40,
        eos=[],
        draft=drafter,
        control_options={"tokens": draft_tokens},
    )
    assert [result.tokens for result in results] == expected
    stats = results[0].call
    if draft_tokens == 0:
        assert stats.drafted == 0 and stats.rounds == 39
    elif wrong_every == 0:
        assert stats.accepted == stats.drafted > 0 and stats.rounds == -(-39 // (draft_tokens + 1))
    elif wrong_every == 1:
        assert stats.accepted == 0 and stats.rounds == 39


def test_sampled_text_depends_on_seeds_alone(llm):
    """Randomness that is consumed: a row's tokens would change with its neighbours, and a seed
    would not repeat."""
    three = plain(llm, sampling=SAMPLED)
    assert three == plain(llm, sampling=SAMPLED) != plain(llm)
    alone = llm.generate(
        PROMPTS[2],
        sampling=SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=5),
        max_new_tokens=40,
        eos=[],
    )
    assert alone.tokens == three[2] and alone.seed == 5


def test_rows_do_not_depend_on_their_neighbours(llm):
    """Ragged rows that end at different times, against each alone; a finished row must not hold up
    or disturb the others."""
    eos = sorted({plain(llm)[0][5], plain(llm)[2][20]})
    together = llm.generate(PROMPTS, max_new_tokens=40, eos=eos)
    alone = [llm.generate(prompt, max_new_tokens=40, eos=eos) for prompt in PROMPTS]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [r.finish_reason for r in together] == [r.finish_reason for r in alone]
    assert len({len(r.tokens) for r in together}) > 1


@pytest.mark.parametrize("at", range(1, 9))
def test_eos_inside_a_draft_ends_the_row_there(llm, at):
    """Accepted tokens after an end of sequence that become visible, or a last token that is
    lost."""
    expected = plain(llm, PROMPTS[:1])[0]
    eos = expected[at]
    first = expected.index(eos)
    result = llm.generate(
        PROMPTS[0],
        max_new_tokens=40,
        eos=[eos],
        draft=ScriptedDrafter([expected]),
        control_options={"tokens": 5},
    )
    assert result.tokens == expected[: first + 1] and result.finish_reason == "eos"
    assert result.stats.new_tokens == first + 1 and result.stats.accepted <= first


@pytest.mark.parametrize("limit", range(1, 9))
def test_limit_inside_a_draft(llm, limit):
    """Overshooting max_new_tokens, the commonest fault of speculative decoders."""
    expected = plain(llm, PROMPTS[:1])[0]
    result = llm.generate(
        PROMPTS[0],
        max_new_tokens=limit,
        eos=[],
        draft=ScriptedDrafter([expected]),
        control_options={"tokens": 5},
    )
    assert result.tokens == expected[:limit] and result.finish_reason == "length"


def test_the_context_ends_a_row_and_drafts_stay_inside_it():
    """Positions beyond the model's context."""
    llm = tiny_llm(seed=4, max_position_embeddings=48)
    expected = llm.generate(PROMPTS[0], max_new_tokens=100, eos=[])
    assert expected.finish_reason == "context" and len(expected.tokens) == 48 - 16
    drafted = llm.generate(
        PROMPTS[0],
        max_new_tokens=100,
        eos=[],
        draft=ScriptedDrafter([expected.tokens]),
        control_options={"tokens": 9},
    )
    assert drafted.tokens == expected.tokens and drafted.finish_reason == "context"
    with pytest.raises(PromptError, match=r"48 tokens, the model's context is 48"):
        llm.generate([5] * 48)


def test_cache_holds_what_was_kept_and_nothing_else(llm):
    """A rollback forgotten on some path; the cache is compared bit by bit with a fresh prefill
    after every round."""
    from selfspec.control.fixed import FixedLength
    from selfspec.core.sampling import row_samplers
    from selfspec.engine.generation import Generation
    from selfspec.engine.row import Request

    expected = plain(llm)
    samplers = row_samplers(None, PROMPTS, ())
    drafting = {"drafter": ScriptedDrafter(expected, 3), "controller": FixedLength(4)}
    requests = [
        Request(prompt, sampler, limit, **drafting)
        for prompt, sampler, limit in zip(PROMPTS, samplers, (20, 33, 27), strict=True)
    ]
    generation = Generation(llm.model, requests)
    rows = list(generation.rows)  # rows that ended are looked at too: their slots are not reused
    for _ in generation:
        for row in rows:
            known = row.tokens[:-1]
            assert generation.cache.length(row.slot) == len(known)
            fresh = llm.model.new_cache(1, len(known))
            llm.model.prefill([known], fresh)
            assert torch.equal(
                generation.cache.keys[:, row.slot, :, : len(known)],
                fresh.keys[:, 0, :, : len(known)],
            )
    assert [len(row.tokens) - len(row.request.prompt) for row in rows] == [20, 33, 27]


def test_a_draft_over_budget_is_our_error_and_leaves_the_model_usable(llm):
    """A drafter's exception that corrupts later calls."""

    class Broken(Drafter, DraftSession):
        name = "broken"

        def start(self, target):
            return self

        def propose(self, rows, texts, budget: Budget) -> list[Draft]:
            if len(texts[0]) > 20:
                raise RuntimeError("drafter failed")
            guesses = ([3] * most for most in budget.tokens)
            return [Draft.chain(*each) for each in zip(texts, guesses, strict=True)]

    expected = plain(llm)
    with pytest.raises(RuntimeError, match="drafter failed"):
        llm.generate(PROMPTS[0], draft=Broken(), eos=[])
    assert plain(llm) == expected


@dataclass(frozen=True)
class SecondIsRight(Drafter):
    """Guesses two tokens ahead of the first prompt, at each place something wrong first."""

    name = "second is right"
    trees = True
    script: Sequence[int] = ()

    def start(self, target):
        return _SecondIsRight(self.script)


class _SecondIsRight(DraftSession):
    def __init__(self, script):
        self.script = script

    def propose(self, rows, texts, budget):
        (text,) = texts
        at = len(text) - len(PROMPTS[0])
        if len(self.script) < at + 2 or budget.tokens[0] < 4:
            return [Draft.chain(text)]
        right, later = self.script[at : at + 2]
        tokens = [text[-1], right ^ 1, right, later ^ 1, later]
        return [Draft(Tree(tokens, [-1, 0, 0, 2, 2]))]


def test_log_probabilities_are_those_of_plain_decoding(llm):
    """Log-probabilities taken at the wrong place of a verified block."""
    options = {"max_new_tokens": 20, "eos": [], "logprobs": 2}
    expected = llm.generate(PROMPTS[0], **options, draft=None)
    for drafter in (ScriptedDrafter([expected.tokens], 3), SecondIsRight(expected.tokens)):
        drafted = llm.generate(
            PROMPTS[0], **options, draft=drafter, control="fixed", control_options={"tokens": 5}
        )
        assert drafted.logprobs == expected.logprobs and len(expected.logprobs) == 20
        assert drafted.stats.accepted > 5
    assert [entry.token for entry in expected.logprobs] == expected.tokens
    cache = llm.model.new_cache(1, 64)
    logits = llm.model.prefill([PROMPTS[0]], cache)
    reference = torch.log_softmax(logits[0].float(), -1)
    assert expected.logprobs[0].logprob == pytest.approx(
        reference[expected.tokens[0]].item(), abs=1e-5
    )
    assert expected.logprobs[0].top.keys() == set(reference.topk(2).indices.tolist())


def test_times_are_taken_when_the_device_is_done(llm, monkeypatch):
    """On a GPU calls return before the work is done: a controller would be told that verifying
    costs nothing."""
    now = [0.0]
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(LayeredModel, "wait", lambda model: now.__setitem__(0, now[0] + 5.0))
    stats = llm.generate(PROMPTS, max_new_tokens=6, eos=[], draft="ngram")[0].call
    assert stats.verify_seconds == 5 * stats.rounds > 0 and stats.host_seconds == 0


def test_stats_add_up(llm):
    """Counters that include thrown-away tokens or forget the prefill."""
    results = llm.generate(PROMPTS, max_new_tokens=12, eos=[], draft=None)
    stats = results[0].call
    assert (
        stats.prompt_tokens == sum(map(len, PROMPTS))
        and stats.new_tokens == 36
        and stats.decoded == 33
    )
    assert stats.rounds == 11 and stats.forward_passes == 12
    assert stats.layer_tokens == 4 * (stats.prompt_tokens + 33)
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0 and stats.peak_memory_bytes > 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda llm: llm.generate(""), PromptError, "empty"),
        (lambda llm: llm.generate([[]]), PromptError, "empty"),
        (lambda llm: llm.generate([]), PromptError, "list of prompts is empty"),
        (lambda llm: llm.generate("a", max_new_tokens=0), OptionError, "at least 1"),
        (lambda llm: llm.generate([9999]), PromptError, "outside the model's vocabulary"),
        (
            lambda llm: llm.generate(
                "a", draft=ScriptedDrafter([[]]), control_options={"tokens": -1}
            ),
            OptionError,
            "cannot draft -1",
        ),
        (lambda llm: llm.generate("a", max_tokens=5), OptionError, "max_new_tokens"),
        (lambda llm: llm.stream(["a", "b"]), OptionError, "one prompt"),
    ],
)
def test_bad_input_is_explained(llm, call, error, words):
    """A traceback from deep inside, or a silent default."""
    with pytest.raises(error, match=words):
        call(llm)

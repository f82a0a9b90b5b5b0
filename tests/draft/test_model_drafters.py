"""The drafters that run part of a model: early-exit, layer-skip, cosine, kv-subset, draft-model,
and what they have in common."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from selfspec import LLM, OptionError, SamplingParams
from selfspec.control.base import Controller, ControlSession
from selfspec.control.fixed import FixedLength
from selfspec.core.contract import Budget, Draft, Outcome
from selfspec.core.sampling import row_samplers
from selfspec.draft.base import Drafter, DraftSession, Target
from selfspec.draft.from_layers.cosine import Cosine
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_layers.kv_subset import KVSubset
from selfspec.draft.from_layers.layer_skip import LayerSkip
from selfspec.draft.from_models.draft_model import DraftModel
from selfspec.draft.registry import make_drafter
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.model import layered
from selfspec.model.compute.plan import LayerPlan
from selfspec.testing import exit_agreement, tiny_llm, tiny_model, tiny_tokenizer
from sessions import begin

PROMPTS = [
    list(b"once upon a time, once upon"),
    list(b"the"),
    list(b"a longer prompt, to be read with the others"),
]
SAMPLED = SamplingParams(temperature=0.8, top_k=40, seed=5)
LAYERS = 6


@pytest.fixture(scope="module")
def hf() -> Any:
    """Its later layers change little, so that parts of it are often right and often wrong."""
    model = tiny_model("llama", seed=4, num_hidden_layers=LAYERS, tie_word_embeddings=False)
    for layer in model.model.layers[2:]:
        layer.self_attn.o_proj.weight.data *= 0.3
        layer.mlp.down_proj.weight.data *= 0.3
    return model


@pytest.fixture(scope="module")
def llm(hf: Any) -> LLM:
    return LLM.from_pretrained(hf, tokenizer=tiny_tokenizer())


def generation(
    llm: LLM,
    drafter: Drafter | None,
    prompts: Sequence[list[int]] = PROMPTS,
    tokens: int = 4,
    new: int = 30,
) -> Any:
    how = {"drafter": drafter, "controller": FixedLength(tokens) if drafter else None}
    requests = [
        Request(*each, new, **how)
        for each in zip(prompts, row_samplers(None, prompts, ()), strict=True)
    ]
    return Generation(llm.model, requests)


def session_of(at_work: Any) -> Any:
    """The session of a generation all of whose rows have the same drafter."""
    (group,) = at_work._groups.all
    return group.session


def begun(
    llm: LLM, drafter: Drafter, prompts: Sequence[list[int]] = PROMPTS
) -> tuple[Any, list[list[int]]]:
    """A drafter at work after the prefill, and the texts it is to continue."""
    started = generation(llm, drafter, prompts)
    started.step()
    return session_of(started), [row.tokens for row in started.rows]


def asked(session: Any, texts: Sequence[list[int]], most: Sequence[int]) -> list[Draft]:
    """A draft for each row."""
    with torch.inference_mode():
        drafts = list(session.propose(range(len(texts)), texts, Budget(most)))
    assert [draft.tree.tokens[0] for draft in drafts] == [text[-1] for text in texts]
    assert all(draft.tree.is_chain for draft in drafts)
    return drafts


def propose(
    llm: LLM, drafter: Drafter, prompts: Sequence[list[int]] = PROMPTS, tokens: int = 4
) -> tuple[list[Draft], list[list[int]]]:
    session, texts = begun(llm, drafter, prompts)
    return asked(session, texts, [tokens] * len(texts)), texts


# --------------------------------------------------------------------------------------- early-exit


@pytest.mark.parametrize("tokens", [1, 3, 12])
@pytest.mark.parametrize("layer", [1, 2, LAYERS - 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_layer_runs_once_for_every_kept_token(
    llm: LLM, layer: int, tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that a draft ran run again in verification: all that reuse saves, lost in silence.
    Counted per layer: the prompt, and of each round the row's last token and every draft, once."""
    monkeypatch.setattr(layered, "MANY", 10**6)  # a prompt's last layer runs like the others
    at_work = generation(llm, EarlyExit(layer), PROMPTS[:rows], tokens)
    each = list(at_work.rows)
    list(at_work)
    stats, computed = at_work.stats, at_work.cache.computed
    rejected = 0
    for row in each:
        own = row.stats
        # each but the last of a row is read once; the prefill's own token takes that one's place
        once = len(row.request.prompt) + own.decoded + own.drafted - own.accepted
        assert computed[row.slot].tolist() == [once] * LAYERS
        assert own.layer_tokens == once * LAYERS
        rejected += own.drafted - own.accepted
    read = sum(map(len, PROMPTS[:rows]))
    assert rejected == stats.drafted - stats.accepted
    assert computed.sum(axis=0).tolist() == [read + stats.decoded + rejected] * LAYERS
    assert stats.accepted > 0 and (tokens == 1 or rejected > 0)
    again = generation(llm, EarlyExit(layer, reuse=False), PROMPTS[:rows], tokens)
    list(again)
    once, twice = read + stats.decoded + rejected, again.stats.drafted
    assert again.cache.computed.sum(axis=0).tolist() == [once + twice] * layer + [once] * (
        LAYERS - layer
    )


def test_the_states_are_those_of_the_whole_model(llm: LLM) -> None:
    """States off by one token, or of another row: verification would go on from somebody else's
    thoughts."""
    drafts, texts = propose(llm, EarlyExit(2))
    for text, draft in zip(texts, drafts, strict=True):
        assert draft.exits is not None
        assert list(draft.exits.layers) == [2] * len(draft.guesses) == [2] * 4
        read = [*text, *draft.guesses[:-1]]
        cache = llm.model.new_cache(1)
        fresh = llm.model.run(
            llm.model.embed(torch.tensor(read)), LayerPlan(0, 2), cache, cache.layout([len(read)])
        )
        assert torch.equal(draft.exits.states, fresh[len(text) - 1 :])


def test_drafts_are_the_exits_own_choice(hf: Any, llm: LLM) -> None:
    """The head without the last norm, or one layer more or less: all exact, only slow. Reference:
    transformers with the other layers cut off."""
    cut = copy.deepcopy(hf)
    cut.model.layers = cut.model.layers[:2]
    cut.config.num_hidden_layers = 2
    drafts, texts = propose(llm, EarlyExit(2), tokens=6)
    for text, draft in zip(texts, drafts, strict=True):
        found = cut.generate(
            torch.tensor([text]),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert draft.guesses == found[0, len(text) :].tolist()


def test_a_quarter_of_the_layers_by_default() -> None:
    """A default that does not fit small models, or drafts with all layers."""
    for layers, expected in ((2, 1), (4, 1), (8, 2), (30, 7)):
        llm = tiny_llm(num_hidden_layers=layers)
        assert begun(llm, EarlyExit(), PROMPTS[:1])[0].plan == LayerPlan(0, expected)


def test_acceptance_by_position_is_the_exits_agreement(hf: Any, llm: LLM) -> None:
    """Acceptance that counts something else than the model's agreement with its exit; the prefill's
    token is never drafted, and one draft a round passes over the tokens that follow an accepted
    one."""
    stats = llm.generate(
        [5], max_new_tokens=200, eos=[], draft=EarlyExit(2), control=FixedLength(12)
    ).stats
    agreed = exit_agreement(hf, 2, 200, [5]) * 200
    assert 0 <= agreed - stats.accepted <= 1 + stats.rounds // 12, (
        "every token but the prefill's was guessed at once"
    )
    assert 0.1 < agreed / 200 < 0.95


def test_a_layerskip_checkpoint_is_read_as_it_is(tmp_path: Path, hf: Any, llm: LLM) -> None:
    """`facebook/layerskip-*`: Llama weights under Llama names; what the recipe left in the config
    must not be in the way."""
    hf.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "layer_dropout_prob": 0.1,
        "early_exit_loss": {"scale": 0.2, "curriculum": "rotational"},
        "output_exit_layers": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = LLM.from_pretrained(tmp_path, tokenizer=tiny_tokenizer())
    found = read.generate(
        PROMPTS[0], max_new_tokens=30, eos=[], draft="early-exit", draft_options={"layer": 3}
    )
    assert found.tokens == llm.generate(PROMPTS[0], max_new_tokens=30, eos=[], draft=None).tokens
    assert found.stats.accepted > 0


# --------------------------------------------------------------------------------------- layer-skip


@pytest.mark.parametrize(
    "attention, mlp, exact", [((3, 4), (4,), 3), ((1,), (), 1), ((), (0,), 0), ((0, 5), (5,), 0)]
)
def test_lists_say_what_is_skipped(
    llm: LLM, attention: tuple[int, ...], mlp: tuple[int, ...], exact: int
) -> None:
    """Attention and MLP lists exchanged; verification that goes on after a layer that was not
    whole."""
    drafter = LayerSkip(attention=attention, mlp=mlp)
    plan = LayerPlan.skipping(LAYERS, attention, mlp)
    (draft,), texts = propose(llm, drafter, PROMPTS[:1], tokens=1)
    cache = llm.model.new_cache(1)
    llm.model.prefill([texts[0][:-1]], cache)
    expected = llm.model.forward(torch.tensor(texts[0][-1:]), cache, cache.layout([1]), plan)
    assert draft.guesses == [int(expected.argmax())]
    assert (list(draft.exits.layers) if draft.exits else []) == ([exact] if exact else [])


@pytest.mark.parametrize(
    "strategy, layers",
    [("uniform", (1, 4)), ("first", (0, 1)), ("middle", (2, 3)), ("last", (4, 5))],
)
def test_strategies_choose_their_share(llm: LLM, strategy: str, layers: tuple[int, ...]) -> None:
    """A share of the wrong total, the same layer twice, or the middle off by one."""
    drafter = LayerSkip(strategy=strategy, attention_share=1 / 3, mlp_share=1 / 6)
    attention, mlp = drafter.skipped(llm.model.shape)
    assert tuple(attention) == layers and len(set(mlp)) == 1


def test_random_layers_are_those_of_a_seed(llm: LLM) -> None:
    """Another draft every time: a benchmark that nobody can repeat."""
    chosen = {
        LayerSkip(strategy="random", attention_share=0.5, seed=seed).skipped(llm.model.shape)
        for seed in (1, 1, 2, 3)
    }
    assert len(chosen) == 3 and all(
        len(set(attention)) == 3 and len(set(mlp)) == 1 for attention, mlp in chosen
    )


def profile(path: Path, **changes: Any) -> str:
    content = {
        "schema_version": 1,
        "family": "llama",
        "layers": LAYERS,
        "attention": [3],
        "mlp": [3, 4],
        **changes,
    }
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return str(path)


def test_a_profile_says_what_is_skipped(tmp_path: Path, llm: LLM) -> None:
    """A profile that is read and not used."""
    drafter = LayerSkip(profile=profile(tmp_path / "p.json", made_by="somebody"))
    assert begun(llm, drafter)[0].plan == LayerPlan.skipping(LAYERS, [3], [3, 4])
    expected = [
        result.tokens for result in llm.generate(PROMPTS, max_new_tokens=30, eos=[], draft=None)
    ]
    assert [
        result.tokens for result in llm.generate(PROMPTS, max_new_tokens=30, eos=[], draft=drafter)
    ] == expected


PROFILES: dict[str, tuple[dict[str, Any], str]] = {
    "another family": (
        {"family": "qwen2"},
        "made for a model with family 'qwen2', this one has 'llama'.* use a profile of this",
    ),
    "another size": ({"layers": 30}, "made for a model with layers 30, this one has 6"),
    "a later version": (
        {"schema_version": 2},
        "has schema_version 2, and this selfspec reads 1; make it again",
    ),
    "no list": ({"mlp": None}, "'mlp' is None where a list of layer numbers is needed"),
    "no numbers": ({"attention": ["3"]}, "'attention' is .'3'. where a list of layer numbers"),
    "outside": (
        {"attention": [6]},
        "skipped layer 6 is outside the plan's layers 0 to 5; leave it out",
    ),
    "everything": (
        {"attention": [*range(6)], "mlp": [*range(6)]},
        "skips every half of layers 0 to 5.*keep at least one",
    ),
    "nothing": ({"attention": [], "mlp": []}, "nothing is skipped.* name layers or raise a share"),
}


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_of_others_are_refused(tmp_path: Path, llm: LLM, name: str) -> None:
    """Layers chosen for another model, skipped here: exact, slow, and nobody knows why."""
    changes, message = PROFILES[name]
    path = profile(tmp_path / "p.json")
    if name == "no list":
        (tmp_path / "p.json").write_text(
            json.dumps({"schema_version": 1, "family": "llama", "layers": 6, "attention": [1]})
        )
    else:
        profile(tmp_path / "p.json", **changes)
    with pytest.raises(OptionError, match=message):
        llm.generate(PROMPTS[0], draft="layer-skip", draft_options={"profile": path})


def test_profiles_that_are_none_are_refused(tmp_path: Path, llm: LLM) -> None:
    """A traceback out of a JSON parser."""
    for content, message in (
        ('{"schema', "is not JSON .* truncated, or no profile"),
        ("[1]", "holds a JSON list where an object"),
    ):
        (tmp_path / "p.json").write_text(content)
        with pytest.raises(OptionError, match=message):
            llm.generate(PROMPTS[0], draft=LayerSkip(profile=str(tmp_path / "p.json")))
    with pytest.raises(
        OptionError, match=r"none.json' .*cannot be read .*; give the path of a JSON file"
    ):
        llm.generate(PROMPTS[0], draft=LayerSkip(profile=str(tmp_path / "none.json")))


# ------------------------------------------------------------------------------------------- cosine


def naive_cosines(hf: Any, prompts: Sequence[list[int]]) -> list[float]:
    """By transformers: what goes into each layer, and that plus what its attention adds."""
    before: dict[int, torch.Tensor] = {}
    found: dict[int, list[torch.Tensor]] = {index: [] for index in range(LAYERS)}
    hooks = []
    for index, layer in enumerate(hf.model.layers):

        def remember(_: Any, arguments: Any, kinds: Any, index: int = index) -> None:
            before[index] = arguments[0] if arguments else kinds["hidden_states"]

        def compare(_: Any, __: Any, output: Any, index: int = index) -> None:
            after = before[index] + output[0]
            found[index].append(F.cosine_similarity(before[index][0], after[0], dim=-1))

        hooks += [
            layer.register_forward_pre_hook(remember, with_kwargs=True),
            layer.self_attn.register_forward_hook(compare),
        ]
    with torch.no_grad():
        for prompt in prompts:
            hf(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return [float(torch.cat(parts).mean()) for parts in found.values()]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("every, keep_last", [(0, 0), (3, 0), (0, 2), (2, 3), (3, 1)])
def test_the_choice_is_that_of_the_paper(
    hf: Any, llm: LLM, every: int, keep_last: int, rows: int
) -> None:
    """Algorithm 1 by transformers' own hidden states. Similarity of the wrong half, the rule's n
    counted from 0, the last layers skipped by the rule they are exempt from, or rows averaged with
    equal weight whatever their length."""
    expected = naive_cosines(hf, PROMPTS[:rows])
    threshold = sorted(expected)[LAYERS // 2] - 1e-3
    drafting, texts = begun(llm, Cosine(threshold, every, keep_last), PROMPTS[:rows])
    asked(drafting, texts, [1] * rows)
    assert drafting.cosines == pytest.approx(expected, abs=1e-4)
    attention, mlp = set(), set()
    for layer, cosine in enumerate(expected[: LAYERS - keep_last]):
        if cosine >= threshold:
            attention.add(layer)
        if every and layer % every == every - 1:
            attention.add(layer), mlp.add(layer)
    assert drafting.plan == (
        LayerPlan.skipping(LAYERS, attention, mlp) if attention or mlp else None
    )


def test_prompts_choose_their_own_drafts(llm: LLM) -> None:
    """A choice kept from an earlier prompt."""
    found = []
    for prompt in PROMPTS:
        drafting, texts = begun(llm, Cosine(), [prompt])
        asked(drafting, texts, [1])
        found.append(drafting.cosines)
    assert len({tuple(cosines) for cosines in found}) == 3


def test_it_costs_no_extra_pass(llm: LLM) -> None:
    """A calibration pass over the prompt, as published code has it."""
    at_work = generation(llm, Cosine(threshold=0.5), PROMPTS[:1])
    steps = iter(at_work)
    next(steps)
    assert at_work.stats.forward_passes == 1 and at_work.cache.computed.tolist() == [
        [len(PROMPTS[0])] * LAYERS
    ]
    list(steps)
    assert at_work.stats.forward_passes == 1 + at_work.stats.rounds


def test_where_nothing_is_similar_nothing_is_drafted(llm: LLM) -> None:
    """A draft that skips nothing is the whole model, run twice."""
    stats = llm.generate(
        PROMPTS[0], max_new_tokens=9, eos=[], draft=Cosine(threshold=1.5, every=0)
    ).stats
    assert stats.drafted == 0 and stats.rounds == 8


# ---------------------------------------------------------------------------------------- kv-subset


def test_drafts_see_the_subset_and_nothing_else(hf: Any, llm: LLM) -> None:
    """By transformers, with the subset as a mask: a draft that sees too much is slow, one that sees
    too little is wrong."""
    drafter = KVSubset(sink=2, recent=5, blocks=2, block_size=3)
    prompt = PROMPTS[2]
    drafting, texts = begun(llm, drafter, [prompt])
    (draft,) = asked(drafting, texts, [5])
    text, known = texts[0], len(texts[0]) - 1
    slots = [0, 1, *(slot for slot in drafting._seen[0] if slot < known)]
    assert len(slots) == len(set(slots)) < known and set(range(known - 5, known)) <= set(slots)
    whole = [*text, *draft.guesses]
    mask = torch.full((len(whole), len(whole)), -torch.inf).triu(1)
    for query in range(known, len(whole)):
        mask[query, :known] = -torch.inf
        mask[query, slots] = 0
    logits = hf(torch.tensor([whole]), attention_mask=mask[None, None]).logits[0]
    assert logits[known:-1].argmax(-1).tolist() == draft.guesses


def test_blocks_are_those_most_like_what_was_read_last(llm: LLM) -> None:
    """Means of the wrong blocks, or chosen once and never again."""
    drafter = KVSubset(sink=1, recent=4, blocks=2, block_size=4)
    drafting, texts = begun(llm, drafter, [PROMPTS[2]])
    known = len(texts[0]) - 1
    slots = drafting._choose_slots(0, known)
    keys = drafting.target.cache.keys[:, 0]
    asked = keys[:, :, known - 8 : known].mean(2)
    count = (known - 4 - 1) // 4
    scores = [
        float((keys[:, :, 1 + 4 * block : 5 + 4 * block].mean(2) * asked).sum())
        for block in range(count)
    ]
    chosen = sorted(sorted(range(count), key=scores.__getitem__)[-2:])
    assert slots == (
        *(slot for block in chosen for slot in range(1 + 4 * block, 5 + 4 * block)),
        *range(1 + 4 * count, known),
    )


def test_a_short_context_is_not_worth_it(llm: LLM) -> None:
    """A draft that sees everything is the whole model, run twice."""
    stats = llm.generate(PROMPTS[0], max_new_tokens=9, eos=[], draft="kv-subset").stats
    assert stats.drafted == 0


# -------------------------------------------------------------------------------------- draft-model


def test_the_model_itself_is_always_right(llm: LLM) -> None:
    """A draft model's cache that forgets to roll back what was rejected, or misses what was kept:
    right at first, then not."""
    for model in (None, llm, llm.model):
        stats = llm.generate(
            PROMPTS, max_new_tokens=40, eos=[], draft=DraftModel(model), control=FixedLength(3)
        )[0].call
        assert stats.accepted == stats.drafted > 0


@dataclass(frozen=True)
class Meddling(Drafter):
    """Turns every third draft wrong after the drafter has made it, so that its own cache holds what
    is rejected."""

    name = "meddling"
    inner: Any = None

    def start(self, target: Target) -> DraftSession:
        inner = self.inner.start(target)

        class At(DraftSession):
            turn = 0

            def admit(self, *row: Any) -> None:
                inner.admit(*row)

            def drop(self, row: int) -> None:
                inner.drop(row)

            def propose(
                self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
            ) -> Sequence[Draft]:
                drafts = inner.propose(rows, texts, budget)
                self.turn += 1
                return [
                    Draft.chain(
                        text, [(token + (self.turn % 3 == 0)) % 256 for token in draft.guesses]
                    )
                    for text, draft in zip(texts, drafts, strict=True)
                ]

        return At()


def test_it_forgets_what_was_rejected(llm: LLM) -> None:
    """After a draft of the same model was rejected from outside, its next ones are right again, or
    its cache holds rubbish."""
    results = llm.generate(
        PROMPTS, max_new_tokens=40, eos=[], draft=Meddling(DraftModel(llm)), control=FixedLength(3)
    )
    stats = results[0].call
    wrong = stats.drafted_at[0] - stats.accepted_at[0]
    assert stats.accepted_at[1:] == stats.drafted_at[1:], "drafts were right or wrong as a whole"
    assert 0.2 < wrong / stats.drafted_at[0] < 0.45, "every third round, and no others"


@dataclass(frozen=True)
class InTurns(Controller):
    """Lets rows draft in two rounds of three, so that a text goes on where nothing was drafted."""

    name = "in-turns"

    def start(self) -> ControlSession:
        turns = itertools.count()

        class At(ControlSession):
            def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
                turn = next(turns)
                return Budget([(turn + i) % 3 and min(4, room) for i, room in enumerate(rooms)])

        return At()


def test_its_drafts_depend_on_the_kept_text_alone(hf: Any, llm: LLM) -> None:
    """Rejected guesses that stay in its cache, kept tokens that it never reads, or another row's:
    it no longer drafts what it does after reading the text anew. Or it reads what it knows again
    and again. Lucky if nothing is rejected, or if no text goes on without it."""
    cut = copy.deepcopy(hf)
    cut.model.layers = cut.model.layers[:2]
    cut.config.num_hidden_layers = 2
    drafter = DraftModel(LLM.from_pretrained(cut, tokenizer=tiny_tokenizer()))
    requests = [
        Request(*each, 40, drafter=drafter, controller=InTurns())
        for each in zip(PROMPTS, row_samplers(None, PROMPTS, ()), strict=True)
    ]
    at_work = Generation(llm.model, requests)
    session = session_of(at_work)
    propose, observe = session.propose, session.observe
    seen: dict[tuple[int, ...], list[int]] = {}
    forgotten: dict[int, list[int]] = {row: [] for row in range(3)}

    def noted(
        rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        drafts: Sequence[Draft] = propose(rows, texts, budget)
        seen.update({tuple(t): list(d.guesses) for t, d in zip(texts, drafts, strict=True)})
        return drafts

    def counted(outcome: Outcome) -> None:
        observe(outcome)
        for of in outcome.rows:
            if of.draft.guesses:  # all but the last were read
                forgotten[of.row].append(max(0, len(of.draft.guesses) - 1 - of.accepted))

    session.propose, session.observe = noted, counted
    list(at_work)
    assert 0 < at_work.stats.accepted < at_work.stats.drafted and len(seen) > 20
    cache = session.target.cache
    for row, counts in forgotten.items():
        once = cache.length(row) + sum(counts[:-1])  # the last round's still lie there
        assert cache.computed[row].tolist() == [once] * 2, f"row {row} was read twice"
    for text, guesses in [*seen.items()][::3]:
        anew = begin(drafter, llm.model, [text])
        assert asked(anew, [list(text)], [len(guesses)])[0].guesses == guesses, len(text)


def test_a_shorter_context_ends_the_drafts(llm: LLM) -> None:
    """Positions that the draft model has no rotary table for; the long text is finished without
    it."""
    small = tiny_llm(seed=9, num_hidden_layers=2, max_position_embeddings=40)
    expected = llm.generate(PROMPTS[0], max_new_tokens=60, eos=[], draft=None)
    drafts: list[int] = []
    result = llm.generate(
        PROMPTS[0], max_new_tokens=60, eos=[], draft=Spy(DraftModel(small), drafts, lengths := [])
    )
    assert result.tokens == expected.tokens and drafts
    assert max(lengths) < 40 + 2 and len(PROMPTS[0]) + 60 > 60


def test_another_vocabulary_is_refused(llm: LLM) -> None:
    """Token 7 of one tokenizer is not token 7 of the other."""
    other = tiny_model("llama", vocab_size=300)
    with pytest.raises(
        OptionError,
        match=r"vocabulary of 300 tokens.*has 259.* use a draft model with the same tokenizer",
    ):
        llm.generate(PROMPTS[0], draft="draft-model", draft_options={"model": other})


def test_what_is_no_model_is_refused(llm: LLM) -> None:
    """A number or a list handed to a loader; the message says what could be given."""
    with pytest.raises(
        OptionError,
        match="model=42 is no model to draft with; give a name, a folder, a live model or an LLM",
    ):
        llm.generate(PROMPTS[0], draft=DraftModel(42))  # type: ignore[arg-type]


def test_a_folder_is_read_once(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights read from disk for every request."""
    from selfspec.draft.from_models import draft_model

    tiny_model("llama", seed=9, num_hidden_layers=2).save_pretrained(tmp_path)
    reads: list[object] = []
    original = draft_model.load
    monkeypatch.setattr(
        draft_model,
        "load",
        lambda source, **options: reads.append(source) or original(source, **options),
    )
    expected = llm.generate(PROMPTS[0], max_new_tokens=12, eos=[], draft=None).tokens
    for source in (str(tmp_path), tmp_path, str(tmp_path)):
        assert (
            llm.generate(PROMPTS[0], max_new_tokens=12, eos=[], draft=DraftModel(source)).tokens
            == expected
        )
    assert len(reads) == 1


# ------------------------------------------------------------------------------ the frequent tokens


@dataclass(frozen=True)
class Spy(Drafter):
    """Notes what is drafted, and how long the texts were."""

    name = "spy"
    inner: Any
    drafts: list[int]
    lengths: list[int]

    def start(self, target: Target) -> DraftSession:
        drafting = self.inner.start(target)
        original = drafting.propose

        def propose(
            rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
        ) -> Sequence[Draft]:
            drafts: Sequence[Draft] = original(rows, texts, budget)
            for text, draft in zip(texts, drafts, strict=True):
                self.drafts.extend(draft.guesses)
                if draft.guesses:
                    self.lengths.append(len(text) + len(draft.guesses))
            return drafts

        drafting.propose = propose
        return drafting


PARTS: dict[str, dict[str, Any]] = {
    "cosine": {"threshold": 0.5},
    "draft-model": {},
    "early-exit": {"layer": 2},
    "kv-subset": {"sink": 1, "recent": 2, "blocks": 1, "block_size": 1},
    "layer-skip": {},
}


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_the_vocabulary(llm: LLM, name: str, sampling: SamplingParams | None) -> None:
    """An index into the part taken for a token, or the part used in verification: what is written
    must not change."""
    call: dict[str, Any] = {"max_new_tokens": 30, "eos": [], "sampling": sampling}
    expected = [result.tokens for result in llm.generate(PROMPTS, draft=None, **call)]
    drafts: dict[int, list[int]] = {0: [], 120: []}
    for size, seen in drafts.items():
        drafter = make_drafter(name, {**PARTS[name], "vocabulary": size})
        results = llm.generate(
            PROMPTS, draft=Spy(drafter, seen, []), control=FixedLength(3), **call
        )
        assert [result.tokens for result in results] == expected
    part = {*range(120), *(token for prompt in PROMPTS for token in prompt)}
    assert drafts[120] and set(drafts[120]) <= part and not set(drafts[0]) <= part
    assert results[0].call.accepted > 0, "a draft from the part can be right"


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("size", [-1, 260])
def test_a_vocabulary_outside_the_models_is_refused(llm: LLM, name: str, size: int) -> None:
    """Rows of the head that do not exist."""
    with pytest.raises(
        OptionError, match=f"vocabulary={size} is outside 0 to 259.*0 scores all of it"
    ):
        llm.generate(PROMPTS[0], draft=name, draft_options={**PARTS[name], "vocabulary": size})


def test_the_whole_vocabulary_is_no_part(llm: LLM) -> None:
    """The full size is allowed, and needs no second head."""
    drafting, texts = begun(llm, EarlyExit(2, vocabulary=259))
    asked(drafting, texts, [1] * 3)
    assert drafting._partial is None


def test_a_list_of_tokens_is_the_drafts_vocabulary(llm: LLM) -> None:
    """A list that is ignored, that replaces the frequent tokens instead of joining them, or whose
    rows are given other ids."""
    expected = llm.generate(PROMPTS, draft=None, max_new_tokens=20)
    written = sorted({token for result in expected for token in result.tokens})
    for frequent in (0, 40):
        allowed = {*range(frequent), *written, *(token for prompt in PROMPTS for token in prompt)}
        seen: list[int] = []
        drafter = Spy(
            make_drafter("early-exit", {"layer": 2, "vocabulary": frequent, "tokens": written}),
            seen,
            [],
        )
        results = llm.generate(PROMPTS, draft=drafter, control=FixedLength(3), max_new_tokens=20)
        assert [result.tokens for result in results] == [result.tokens for result in expected]
        assert seen and set(seen) <= allowed and max(seen) >= 40, (
            "the drafts are of the list, and not of its first rows alone"
        )
        assert results[0].call.accepted > 0


def test_what_the_prompt_says_can_be_drafted(llm: LLM) -> None:
    """Names and numbers of a prompt that the most frequent tokens do not hold: what is copied could
    never be drafted. Also logits that are given to the wrong ones of the added tokens."""
    drafting, texts = begun(llm, EarlyExit(2, vocabulary=8))
    asked(drafting, texts, [1] * 3)
    head = drafting._partial
    x = torch.randn(5, llm.model.shape.width, generator=torch.Generator().manual_seed(0))
    assert sorted(head.tokens.tolist()) == sorted(
        {*range(8), *(token for prompt in PROMPTS for token in prompt)}
    )
    assert torch.allclose(head(x), llm.model.head(x)[:, head.tokens], atol=1e-5)
    alone, texts = begun(llm, EarlyExit(2, vocabulary=8), PROMPTS[1:2])
    asked(alone, texts, [1])
    assert len(alone._partial.tokens) == 8 + len(set(PROMPTS[1])), (
        "another request's prompt stays out"
    )
    alone.cache.reserve_rows(2)  # a row that comes later
    llm.model.prefill([texts[0][:-1], PROMPTS[2][:-1]], alone.cache)
    alone.admit(1, PROMPTS[2], row_samplers(None, [[1]], ())[0])
    asked(alone, [*texts, PROMPTS[2]], [1, 1])
    assert sorted(alone._partial.tokens.tolist()) == sorted({*range(8), *PROMPTS[1], *PROMPTS[2]})


@pytest.mark.parametrize("token", [-1, 259])
def test_a_token_that_does_not_exist_is_refused(llm: LLM, token: int) -> None:
    """Rows of the head that do not exist, in the list."""
    with pytest.raises(OptionError, match=f"tokens: {token} is outside 0 to 258.*tokenizer"):
        llm.generate(
            PROMPTS[0], draft="early-exit", draft_options={"layer": 2, "tokens": [3, token]}
        )


def test_nothing_is_drafted_behind_an_end(llm: LLM) -> None:
    """Drafts behind a token that ends the row, which cost time and can never be kept; or an end of
    one row that stops another."""
    free, _ = propose(llm, EarlyExit(4), tokens=6)
    first, last = list(free[0].guesses), list(free[2].guesses)
    ends = [frozenset[int](), frozenset(first[2:3]), frozenset(last[2:3])]
    requests = [
        Request(*each, 24, eos=end, drafter=EarlyExit(4), controller=FixedLength(6))
        for *each, end in zip(PROMPTS, row_samplers(None, PROMPTS, ()), ends, strict=True)
    ]
    at_work = Generation(llm.model, requests)
    rows = list(at_work.rows)
    at_work.step()
    drafts = asked(session_of(at_work), [row.tokens for row in rows], [6] * 3)
    assert drafts[0].guesses == first, "the end of the second row is none of the first"
    assert drafts[2].guesses == last[: last.index(last[2]) + 1]
    for _ in at_work:
        pass
    for row, prompt, end in zip(rows, PROMPTS, ends, strict=True):
        assert (
            row.tokens[len(prompt) :]
            == llm.generate(prompt, draft=None, max_new_tokens=24, eos=sorted(end)).tokens
        )


# ---------------------------------------------------------------------------------- hostile options

HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    (
        "early-exit",
        {"layer": 0},
        "exit layer 0 is not inside this model of 6 layers; choose 1 to 5",
    ),
    (
        "early-exit",
        {"layer": 6},
        "exit layer 6 is not inside this model of 6 layers; choose 1 to 5",
    ),
    ("early-exit", {"layer": -1}, "exit layer -1 is not inside"),
    ("early-exit", {"layer": "3"}, "layer='3' is not a whole number"),
    ("early-exit", {"layer": 2.5}, "layer=2.5 is not a whole number"),
    ("early-exit", {"layers": 3}, "no option 'layers'; did you mean 'layer'"),
    (
        "layer-skip",
        {"attention": (6,)},
        "skipped layer 6 is outside the plan's layers 0 to 5; leave it out",
    ),
    ("layer-skip", {"mlp": (-1,)}, "skipped layer -1 is outside"),
    (
        "layer-skip",
        {"attention": tuple(range(6)), "mlp": tuple(range(6))},
        "skips every half of layers 0 to 5.*keep at least one",
    ),
    ("layer-skip", {"attention_share": 1.0, "mlp_share": 1.0}, "skips every half"),
    (
        "layer-skip",
        {"attention_share": 0.0, "mlp_share": 0.0},
        "nothing is skipped.* name layers or raise a share",
    ),
    (
        "layer-skip",
        {"attention_share": 20},
        "attention_share=20 is no share of the layers; use 0 .* to 1",
    ),
    ("layer-skip", {"attention_share": float("nan")}, "attention_share=nan is not a finite number"),
    ("layer-skip", {"strategy": "uniforn"}, "no strategy 'uniforn'; did you mean 'uniform'"),
    (
        "layer-skip",
        {"attention": (1,), "seed": 3},
        "seed=3 is for a strategy, but layers are given; leave out one",
    ),
    ("layer-skip", {"attention": (1,), "profile": "p.json"}, "both say what to skip; give one"),
    ("cosine", {"every": 1}, "every=1 would skip all layers or means nothing; use 2 or more, or 0"),
    ("cosine", {"every": -3}, "every=-3 would skip all"),
    ("cosine", {"keep_last": -1}, "keep_last=-1 is negative; use 0"),
    (
        "cosine",
        {"keep_last": 6},
        "keep_last=6 keeps all 6 layers of this model, so nothing is skipped; use less",
    ),
    ("cosine", {"threshold": -2.0}, "threshold=-2.0 is below any cosine; use -1 to 1"),
    ("cosine", {"threshold": float("nan")}, "threshold=nan is not a finite number"),
    ("kv-subset", {"sink": -1}, "sink=-1 leaves no such part of the cache; use 0 or more"),
    ("kv-subset", {"recent": 0}, "recent=0 leaves no such part of the cache; use 1 or more"),
    (
        "kv-subset",
        {"block_size": 0},
        "block_size=0 leaves no such part of the cache; use 1 or more",
    ),
]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    HOSTILE,
    ids=[f"{name}-{options}" for name, options, _ in HOSTILE],
)
def test_hostile_options_are_refused(
    llm: LLM, name: str, options: dict[str, Any], message: str
) -> None:
    """A traceback from the middle of a pass, or a value taken silently; the message names it, the
    limit and what to do."""
    with pytest.raises(OptionError, match=message):
        llm.generate(PROMPTS[0], max_new_tokens=9, draft=name, draft_options=options)


# --------------------------------------------------------------------------------- one read a draft


@pytest.mark.parametrize(
    "drafter",
    [
        EarlyExit(layer=2),
        EarlyExit(layer=2, vocabulary=60),
        LayerSkip(),
        KVSubset(2, 2, 1, 2),
        DraftModel(),
    ],
    ids=lambda drafter: f"{drafter.name}-{drafter.vocabulary}",
)
@pytest.mark.parametrize("most", [[4, 4, 4], [3, 0, 6], [1, 5, 0], [0, 0, 0]])
def test_drafts_of_known_length_are_the_same_without_reading(
    llm: LLM, drafter: Drafter, most: list[int]
) -> None:
    """Drafts whose tokens stay on the device until the end: given to the wrong row once one of them
    is done, or one step late. They would still be exact, and hardly ever right. Where reading costs
    nothing, on a CPU, they are read one by one."""
    found = []
    for waits in (True, False):
        drafting, texts = begun(llm, drafter)
        drafting.reads_wait = waits
        found.append(asked(drafting, texts, most))
    for unread, read, prompt, wanted in zip(*found, PROMPTS, most, strict=True):
        assert unread.guesses == read.guesses
        # it has nothing to leave out there
        short = isinstance(drafter, KVSubset) and len(prompt) <= drafter.size
        assert len(unread.guesses) == (0 if short else wanted)
        assert (unread.exits is None) == (read.exits is None)
        if unread.exits is not None and read.exits is not None:
            assert unread.exits.layers == read.exits.layers
            assert torch.equal(unread.exits.states, read.exits.states)


def test_a_draft_of_known_length_is_read_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read after every token, for which a GPU waits each time."""
    drafting, texts = begun(llm, EarlyExit(layer=2))
    assert not drafting.reads_wait, "on a CPU a draft ends where a sequence does"
    drafting.reads_wait = True
    reads = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: reads.append(len(tensor)) or original(tensor)
    )
    asked(drafting, texts, [5, 2, 4])
    assert reads == [11]

"""The draft head at work: what it drafts depends on the kept text alone, and is what was
trained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from selfspec import LLM
from selfspec.control.base import ControlSession
from selfspec.control.fixed import FixedLength
from selfspec.core.contract import Budget, Draft, Outcome, RoundTime
from selfspec.core.sampling import SamplingParams
from selfspec.core.tree import Tree
from selfspec.draft.base import Drafter, DraftSession, JoinedSession, Target
from selfspec.draft.beam import Beam, layout_of
from selfspec.draft.entries import Entries
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_models.draft_head import DraftHead, _Head
from selfspec.errors import BrokenCheckpoint, OptionError
from selfspec.model.compute.cache import RowSpan, TokenLayout
from selfspec.model.compute.hidden_states import StateCollector
from selfspec.testing import tiny_adapter, tiny_head, tiny_llm, tiny_model, tiny_tokenizer
from selfspec.train.head_net import HeadNet, Roots
from selfspec.trained.blocks import BlockSize
from selfspec.trained.files import TrainedPart, load_part, ready

PROMPTS = [list(text) for text in (b"once upon a time, once upon", b"the", b"aXb aXb aXb a")]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm(seed=4)


@pytest.fixture(scope="module")
def part(llm: LLM) -> TrainedPart:
    """It can say what the model likes to say, so that some drafts are kept and some are not."""
    said = Counter(
        token
        for each in llm.generate(PROMPTS, max_new_tokens=40, eos=[], draft=None)
        for token in each.tokens
    )
    return tiny_head(llm.model, seed=1, vocabulary=[token for token, _ in said.most_common(6)])


@pytest.fixture(scope="module")
def adapter(llm: LLM, part: TrainedPart) -> TrainedPart:
    return tiny_adapter(llm.model, vocabulary=part.tensors["vocabulary"].tolist())


@dataclass(frozen=True)
class Spy(Drafter, DraftSession):
    """Notes what is drafted after which text."""

    name = "spy"
    inner: Any
    seen: dict[tuple[int, ...], Tree]

    def start(self, target: Target) -> DraftSession:
        inner = self.inner.start(target)
        spy = replace(self, inner=inner)
        object.__setattr__(spy, "collectors", inner.collectors)
        return spy

    def admit(self, *row: Any) -> None:
        self.inner.admit(*row)

    def drop(self, row: int) -> None:
        self.inner.drop(row)

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        drafts: Sequence[Draft] = self.inner.propose(rows, texts, budget)
        for text, draft in zip(texts, drafts, strict=True):
            self.seen[tuple(text)] = draft.tree
        return drafts

    def observe(self, outcome: Outcome) -> None:
        self.inner.observe(outcome)


def drafts(
    llm: LLM,
    drafter: Drafter,
    prompts: list[list[int]],
    new: int = 30,
    tokens: int = 5,
    sampling: SamplingParams | None = None,
) -> Any:
    """What is drafted after which text, and the statistics."""
    seen: Any = {}
    how = {"draft": Spy(drafter, seen), "control": FixedLength(tokens), "sampling": sampling}
    found = llm.generate(prompts, max_new_tokens=new, eos=[], **how)
    return seen, found[0].call


def listed(tree: Tree) -> tuple[list[int], list[int]]:
    return list(tree.tokens), list(tree.parents)


MAKERS = {
    "chain": lambda part, adapter: DraftHead(part),
    "tree": lambda part, adapter: DraftHead(part, width=3),
    "adapter": lambda part, adapter: EarlyExit(part=adapter),
    "adapter, nothing reused": lambda part, adapter: EarlyExit(part=adapter, reuse=False),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_draft_depends_on_the_kept_text_alone(
    llm: LLM, part: TrainedPart, adapter: TrainedPart, name: str
) -> None:
    """Rounds, rejections, neighbours leave nothing behind: entries of rejected drafts in the head's
    cache, states of a wrong branch, the states of another row. It drafts what it would after
    reading the text anew. Lucky if nothing is rejected."""
    drafter = MAKERS[name](part, adapter)
    seen, stats = drafts(llm, drafter, PROMPTS)
    assert 0 < stats.accepted < stats.drafted
    whole = [text for text in seen if len(seen[text].guesses) == 5]
    assert len(whole) > 20
    for text in whole[::3]:
        anew, _ = drafts(llm, drafter, [list(text[:-1])], new=7)
        assert listed(anew[text]) == listed(seen[text]), f"after {len(text)} tokens"


def test_it_drafts_what_was_trained(part: TrainedPart) -> None:
    """The trained module and what runs are written twice: another position, norm, order of taps or
    feeding of its own output, and what training measures is not what drafting gets. Nothing is
    rounded here."""
    llm = LLM.from_pretrained(tiny_model(seed=4), tokenizer=tiny_tokenizer(), kernel="plain")
    seen, _ = drafts(llm, DraftHead(part), PROMPTS[:1], new=40)
    text = max(seen, key=len)
    net = HeadNet(BlockSize(**part.settings["block"]), 2, llm.model.shape.context)
    net.load_state_dict({name: part.tensors[name] for name in net.state_dict()})
    for ours, tree in [item for item in seen.items() if len(item[1].guesses) == 5][::4]:
        tokens, states = [*ours], states_of(llm, text, part.settings["layers"])
        # the trainer knows the text that is drafted; here it is written draft by draft
        for _ in range(5):
            tokens.append(last_guess(llm, net, part, tokens, len(ours) - 2, states))
        assert tree.is_chain and tokens[len(ours) :] == list(tree.guesses)


def states_of(llm: LLM, text: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    model, collectors = llm.model, StateCollector(layers)
    cache = model.new_cache(1, len(text))
    with torch.inference_mode():
        model.run(
            model.embed(torch.tensor(text)),
            model.full_plan,
            cache,
            cache.layout([len(text)]),
            collectors=[collectors],
        )
    ((_, states),) = collectors.take()
    return (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5))[None].clone()


class Ends:
    """What training borrows of a model, from the model that runs."""

    def __init__(self, llm: LLM, part: TrainedPart) -> None:
        self._model, self.vocabulary = llm.model, part.tensors["vocabulary"].long()
        self.index = torch.full((llm.model.shape.vocabulary,), -1)
        self.index[self.vocabulary] = torch.arange(len(self.vocabulary))
        self.logged: list[torch.Tensor] = []

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self._model.embed(tokens.flatten())
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).view(*tokens.shape, -1)

    def logits(self, x: torch.Tensor, some: torch.Tensor | None = None) -> torch.Tensor:
        self.logged.append(self._model.head(x)[:, self.vocabulary])
        return self.logged[-1]


def last_guess(
    llm: LLM, net: HeadNet, part: TrainedPart, tokens: list[int], root: int, states: torch.Tensor
) -> int:
    """What the trained module drafts last, from this root, over the tokens after it."""
    ends, count = Ends(llm, part), len(tokens)
    padded = torch.cat([states, states[:, -1:].expand(1, 64, *states.shape[2:])], dim=1)[:, :count]
    blank = torch.zeros(1, count, 1)
    batch = {
        "tokens": torch.tensor([tokens]),
        "states": padded,
        "ids": blank.long(),
        "chances": blank,
    }
    with torch.no_grad():
        net(ends, batch, Roots(torch.tensor([0]), torch.tensor([root])), count - root - 1)  # type: ignore[arg-type]
    return int(ends.vocabulary[ends.logged[-1][0].argmax()])


@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.9, seed=3)])
def test_a_guess_in_one_call_is_that_of_pieces(
    llm: LLM, part: TrainedPart, sampling: SamplingParams | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came out before a guess left out or that of another row, an embedding that is not of
    unit size, the best row of the part's head taken for a token."""
    head = ready(part, llm.model, _Head)
    assert head.guess is not None
    found = []
    for guess in (head.guess, None):
        monkeypatch.setattr(head, "guess", guess)
        seen, _ = drafts(llm, DraftHead(part), PROMPTS, sampling=sampling)
        found.append({text: listed(tree) for text, tree in seen.items()})
    assert found[0] == found[1]


def test_a_tree_follows_the_chain(llm: LLM, part: TrainedPart) -> None:
    """A tree's entries at other positions than a chain's, or guesses that see each other: its first
    path is the chain's."""
    chains, trees = (drafts(llm, DraftHead(part, width=width), PROMPTS)[0] for width in (1, 2))
    both = [text for text in chains if text in trees and not trees[text].is_chain]
    assert len(both) > 5
    for text in both:
        tree, path = trees[text], []
        parents, here = list(tree.parents), 0
        while here in parents:
            here = parents.index(here)
            path.append(tree.tokens[here])
        assert path == list(chains[text].guesses)[: len(path)]


def test_the_likeliest_guesses_are_kept() -> None:
    """Guesses in the order in which they were found, or by their own chance instead of their
    path's."""
    beam = Beam(0, 9, 10, most=4, width=2)
    assert beam.extend([[1, 2]], [[0.6, 0.3]]) == [0, 0]
    layout = layout_of([beam])
    assert layout.positions.tolist() == [10, 10] and layout.slots.tolist() == [10, 11]
    assert layout.stops.tolist() == [10, 10] and layout.ancestors == ((10,), (11,))
    assert layout.spans == (RowSpan(0, 10, 2),)
    # 0.27 after token 2, 0.24 after token 1
    assert beam.extend([[3, 4], [5, 6]], [[0.4, 0.1], [0.9, 0.05]]) == [1, 0]
    assert listed(beam.tree()) == ([9, 1, 2, 3, 5], [-1, 0, 0, 1, 2])
    layout = layout_of([beam])
    assert layout.positions.tolist() == [11, 11] and layout.slots.tolist() == [12, 13]
    assert layout.ancestors == ((11, 12), (10, 13))


@pytest.mark.parametrize("name", ["chain", "adapter"])
def test_a_cached_beginning_is_gone_around(
    llm: LLM, part: TrainedPart, adapter: TrainedPart, name: str
) -> None:
    """A second turn of a chat: the states of what was cached are not there, and a head that
    attended to empty slots, or waited for them, would draft rubbish or never again."""
    messages = [{"role": "user", "content": "once upon"}]
    for turn in range(2):
        prompt = llm.encode_chat(messages)
        expected = llm.generate(prompt, max_new_tokens=12, eos=[], draft=None)
        answer = llm.chat(
            messages,
            max_new_tokens=12,
            eos=[],
            draft=MAKERS[name](part, adapter),
            control=FixedLength(3),
        )
        assert answer.tokens == expected.tokens
        assert answer.stats.drafted > 6
        assert answer.stats.cached_prompt_tokens > 0 or not turn
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": "and so on"},
        ]


@dataclass(frozen=True)
class Dozing(Drafter):
    """Passes over three rounds of four."""

    name = "dozing"
    decides_how_much: ClassVar[bool] = True
    inner: Any

    def start(self, target: Target) -> DraftSession:
        return _Dozing(self.inner.start(target))


class _Dozing(JoinedSession, ControlSession):
    def __init__(self, session: DraftSession) -> None:
        super().__init__([session])
        self.control, self._rest = self, 0

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        return Budget([min(3, room) for room in rooms])

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        return self._sessions[0].propose(rows, texts, budget)

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        self._rest = 3

    @property
    def rests(self) -> int:
        return self._rest

    def passed_over(self, rows: int, tokens: int, seconds: float) -> None:
        self._rest -= 1


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "in a batch"])
@pytest.mark.parametrize("name", MAKERS)
def test_rounds_it_passed_over_are_known_afterwards(
    llm: LLM, part: TrainedPart, adapter: TrainedPart, prompts: list[list[int]], name: str
) -> None:
    """Several rounds are told at once, as drafts that were kept, but their states came one by one.
    Who lines them up wrongly drafts other guesses than one that saw every round."""
    drafter = MAKERS[name](part, adapter)
    whole, _ = drafts(llm, drafter, prompts, tokens=1)
    seen: dict[tuple[int, ...], Tree] = {}
    llm.generate(prompts, max_new_tokens=30, eos=[], draft=Dozing(Spy(drafter, seen)))
    both = whole.keys() & seen.keys()
    assert len(both) > 5 and any(len(seen[text].tokens) > 1 for text in both)
    for text in both:
        assert seen[text].tokens[:2] == whole[text].tokens[:2], len(text)


def test_rounds_it_does_not_see_cost_it_nothing_but_time(llm: LLM, part: TrainedPart) -> None:
    """States of rounds in which another drafter's states stood in for early layers are missing: it
    must begin anew, not line up what it has with other tokens."""
    entries = Entries([0, 1], llm.model.new_cache(1))
    entries.admit(0)
    states = torch.randn(4, 2, llm.model.shape.width)
    for first in (0, 6):
        layout = TokenLayout.chains([RowSpan(0, first, 4)])
        for layer in (0, 1):
            entries.collectors.put(layer, layout, states[:, layer])
    # a pass that ran layer 1 only
    entries.collectors.put(1, TokenLayout.chains([RowSpan(0, 10, 1)]), states[:1, 1])
    entries.gather()
    assert (entries[0].first, entries[0].held, entries[0].end) == (6, 0, 10)


def test_a_part_is_saved_and_found_again(llm: LLM, part: TrainedPart, tmp_path: Path) -> None:
    """A name or a tensor lost on the way to the disk: the part drafts otherwise, or is refused."""
    part.save(tmp_path / "head")
    stored = load_part(tmp_path / "head")
    assert stored.settings == part.settings and stored.base == part.base
    text = PROMPTS[:1]
    assert (
        drafts(llm, DraftHead(tmp_path / "head"), text)[0] == drafts(llm, DraftHead(part), text)[0]
    )


def test_eight_bits_are_nearly_the_same(part: TrainedPart, tmp_path: Path) -> None:
    """A scale of the wrong row, or a matrix lost: the part that is shipped would not be the one
    that was measured."""
    part.save(tmp_path / "whole")
    part.save(tmp_path / "small", eight_bits=True)
    files = [tmp_path / name / "part.safetensors" for name in ("whole", "small")]
    assert files[1].stat().st_size < 0.4 * files[0].stat().st_size  # these tensors are float32
    found = load_part(tmp_path / "small").tensors
    assert found.keys() == part.tensors.keys()
    for name, tensor in part.tensors.items():
        error = (found[name] - tensor).float().abs()
        assert bool((error <= tensor.float().abs().amax(-1, keepdim=True) / 127).all()), name


def test_what_is_no_part_for_this_model_is_refused(
    llm: LLM, part: TrainedPart, tmp_path: Path
) -> None:
    """Another model's part drafts rubbish silently; of the same shape too."""
    other = tiny_llm(seed=5)
    with pytest.raises(OptionError, match="with other weights"):
        other.generate([5], draft=DraftHead(part))
    with pytest.raises(OptionError, match="its layers was 4, this one's is 2"):
        tiny_llm(seed=4, num_hidden_layers=2).generate([5], draft=DraftHead(part))
    with pytest.raises(OptionError, match="of kind 'exit-adapter'"):
        llm.generate([5], draft=DraftHead(replace(part, kind="exit-adapter")))
    with pytest.raises(OptionError, match="is no part"):
        llm.generate([5], draft=DraftHead(tmp_path))
    with pytest.raises(OptionError, match="needs part=FOLDER"):
        llm.generate([5], draft="draft-head")
    part.save(tmp_path)
    (tmp_path / "part.safetensors").write_bytes(b"cut off")
    with pytest.raises(BrokenCheckpoint, match="cannot be read"):
        llm.generate([5], draft=DraftHead(tmp_path))
    described = json.loads((tmp_path / "part.json").read_text())
    (tmp_path / "part.json").write_text(json.dumps({**described, "schema": 99}))
    part.save(tmp_path / "again")
    (tmp_path / "again" / "part.json").write_text(json.dumps({**described, "schema": 99}))
    with pytest.raises(OptionError, match="schema 99"):
        llm.generate([5], draft=DraftHead(tmp_path / "again"))


def test_an_exit_adapter_says_where_it_exits(llm: LLM, adapter: TrainedPart) -> None:
    """An option that contradicts the part, and is ignored."""
    for options in ({"layer": 3}, {"vocabulary": 50}):
        with pytest.raises(OptionError, match="trained for an exit after 2 layers"):
            llm.generate([5], draft=EarlyExit(part=adapter, **options))
    assert llm.generate(
        [5], max_new_tokens=4, eos=[], draft=EarlyExit(layer=2, part=adapter)
    ).stats.drafted


def test_half_precision_is_the_same_model(part: TrainedPart) -> None:
    """A signature that hangs on the precision: a part could not be used with a model loaded in
    bfloat16."""
    from selfspec.testing import tiny_model

    half = LLM.from_pretrained(
        tiny_model(seed=4).to(torch.bfloat16), tokenizer=tiny_tokenizer(), dtype=torch.bfloat16
    )
    assert half.generate([5, 6], max_new_tokens=8, eos=[], draft=DraftHead(part)).stats.drafted


@pytest.mark.parametrize(("options", "words"), [({"width": 0}, "width=0")])
def test_options_outside_their_limits(options: dict[str, Any], words: str) -> None:
    """A value that would fail in the middle of a generation."""
    with pytest.raises(OptionError, match=words):
        DraftHead(**options)

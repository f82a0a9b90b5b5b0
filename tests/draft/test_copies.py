"""Drafting with a copy of the model in fewer bits."""

from __future__ import annotations

import gc

import pytest
import torch

from selfspec import LLM
from selfspec.control.cost_aware import CostAwareSession
from selfspec.control.costs import CostModel
from selfspec.core.contract import Budget
from selfspec.draft.auto import Auto
from selfspec.draft.base import Target
from selfspec.draft.chain import LayerSession
from selfspec.draft.from_layers import quantised
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_layers.layer_skip import LayerSkip
from selfspec.draft.from_layers.quantised import Quantised, _Session
from selfspec.draft.from_text.ngram import _Index
from selfspec.errors import OptionError, ResourceError
from selfspec.model import copies
from selfspec.model.compute.cpu.choosing import BROKEN
from selfspec.model.compute.cpu.few_bits import Int4, Int8
from selfspec.model.copies import copy_in
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel, Scored
from selfspec.testing import tiny_adapter, tiny_lora, tiny_model

PROMPT = [*b"once upon a time, once upon a time, once"]
OPTIONS = {"max_new_tokens": 24, "eos": []}


def tiny(**options):
    return LLM(from_transformers(tiny_model(), **options), None, "tiny")


def fixed(tokens):
    return {"control": "fixed", "control_options": {"tokens": tokens}}


def test_a_copy_is_made_once_and_leaves_the_model_alone():
    """A copy for each request, or products of the model's own replaced."""
    model = tiny().model
    before = model.linears
    copy = copy_in(model, "int8")
    assert copy is copy_in(model, "int8") and model.linears == before
    assert all(isinstance(linear, Int8) for linear in copy.linears)
    assert copy.embedding is model.embedding


def test_few_bits_are_taken_where_they_lose_nothing():
    """4 bits for weights that they round, or 8 for weights that were 4 bits before."""
    hf = tiny_model()
    model = from_transformers(hf)
    assert isinstance(copy_in(model, "auto").linears[0], Int8)
    for layer in hf.model.layers:
        for linear in (*layer.self_attn.children(), *layer.mlp.children()):
            if hasattr(linear, "weight"):
                packed = Int4([linear.weight.detach()], [None])
                linear.weight.data = packed.rows(torch.arange(len(linear.weight)))
    rounded = copy_in(from_transformers(hf), "auto")
    assert isinstance(rounded.linears[0], Int4) and isinstance(rounded.head_product, Int8)


def test_a_model_of_few_bits_is_drafted_for_by_fewer():
    """A copy as large as the model, which could not pay."""
    model = from_transformers(tiny_model(), weights="int8")
    assert isinstance(copy_in(model, "auto").linears[0], Int4)
    with pytest.raises(OptionError, match="a copy in int8 is no smaller than the model"):
        copy_in(model, "int8")
    llm = LLM(model, None, "tiny")
    plain = llm.generate(PROMPT, draft=None, **OPTIONS)
    drafted = llm.generate(PROMPT, draft="quantised", **fixed(5), **OPTIONS)
    assert drafted.tokens == plain.tokens and drafted.stats.accepted > 0


def test_auto_leaves_out_a_copy_that_reads_nearly_as_much(monkeypatch):
    """Memory for a copy in 4 bits of a model in 8, and looks at it, where it can hardly pay; or
    none for a model whose copy reads a quarter, or for who names the copy alone."""
    made, both = [], ["hybrid", "quantised"]
    monkeypatch.setattr(copies, "_made", lambda model, kind: made.append(kind) or model)
    for weights, candidates in (("int8", both), ("float32", both), ("int8", "quantised")):
        model = from_transformers(tiny_model(), weights=weights)
        Auto(candidates=candidates).start(Target(model, model.new_cache(1, 16)))
    assert made == ["int8", "int4"]


def test_models_that_torch_runs_have_no_copy():
    """An option that is accepted and changes nothing."""
    llm = tiny(kernel="plain")
    with pytest.raises(OptionError, match="run by kernel 'plain'; draft with 'hybrid'"):
        llm.generate(PROMPT, draft="quantised", **OPTIONS)
    llm.generate(PROMPT, draft="auto", **OPTIONS)  # it does without


def test_without_memory_for_a_copy_drafting_goes_on(monkeypatch):
    """A request that fails for want of what only makes it faster."""
    monkeypatch.setattr(copies, "available_memory", lambda device: 1000)
    llm = tiny()
    with pytest.warns(UserWarning, match="are free: drafting goes on without it"):
        found = llm.generate(PROMPT, draft="quantised", **fixed(5), **OPTIONS)
    assert found.tokens == llm.generate(PROMPT, draft=None, **OPTIONS).tokens
    with pytest.raises(ResourceError, match="a copy of the weights in int8 needs about"):
        llm.generate(
            PROMPT, draft="quantised", draft_options={"first": "none"}, **fixed(5), **OPTIONS
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"first": "auto"}, "decides itself how much it drafts"),
        ({"guesses": -1}, "guesses is 0 or more"),
        ({"sure": 1.5}, "a probability from 0"),
        ({"unsure": -0.5}, "unsure one from 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, words):
    """A controller that nobody asks, a draft that never stops or never begins."""
    with pytest.raises(OptionError, match=words):
        Quantised(**options)


def test_a_first_drafter_that_reads_states_is_refused():
    """States of the copy taken for the model's."""
    with pytest.raises(OptionError, match="reads states of the whole model"):
        tiny().generate(
            PROMPT, draft="quantised", draft_options={"first": "cosine"}, **fixed(5), **OPTIONS
        )


def test_drafts_stop_where_the_copy_is_unsure():
    """A threshold that is never looked at."""
    llm = tiny()
    sure, bold = (
        llm.generate(
            PROMPT, draft="quantised", draft_options={"sure": share}, **fixed(6), **OPTIONS
        )
        for share in (1.0, 0.0)
    )
    assert sure.tokens == bold.tokens
    assert sure.stats.drafted == sure.stats.verifications > bold.stats.verifications


def test_an_index_takes_back_what_was_not_kept():
    """Guesses of another drafter that stay in the index as if they were text."""
    text, guessed = [1, 2, 3, 1, 2], [1, 2, 3, 1, 2, 9, 1, 2, 9]
    index, fresh = _Index(1, 3), _Index(1, 3)
    index.enter(guessed)
    index.enter([*text, 3, 4])
    fresh.enter([*text, 3, 4])
    assert (index._latest, index._earlier) == (fresh._latest, fresh._earlier)


def test_places_of_an_ngram_come_latest_first():
    """Places that are lost, of another n-gram of the same size, or in the wrong order."""
    text = [1, 2, 1, 2, 3, 1, 2, 1]
    index = _Index(1, 2)
    index.enter(text)
    for gram in {(1,), (2,), (3,), (1, 2), (2, 1), (3, 1), (9,)}:
        size = len(gram)
        places = [at for at in range(size, len(text)) if tuple(text[at - size : at]) == gram]
        assert list(index._places(gram)) == places[::-1]


def test_an_index_makes_few_objects_that_python_watches():
    """A list for each n-gram: 16 long prompts bring tens of thousands, and the collections that
    they cause stop all rows for a quarter of a second."""
    index, before = _Index(1, 4), _lists()
    index.enter(list(range(500)))
    assert _lists() - before < 100


def _lists() -> int:
    return sum(type(each) is list for each in gc.get_objects())


def test_second_choices_make_a_tree():
    """Second choices that nobody verifies, that follow the first instead of standing beside it, or
    that are more than the budget."""
    llm, shapes = tiny(), []
    propose = _Session.propose

    def watched(self, rows, texts, budget):
        drafts = propose(self, rows, texts, budget)
        shapes.extend(zip(budget.tokens, (draft.tree for draft in drafts), strict=True))
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Session, "propose", watched)
        found = llm.generate(
            PROMPT, draft="quantised", draft_options={"unsure": 1.0}, **fixed(5), **OPTIONS
        )
    assert found.tokens == llm.generate(PROMPT, draft=None, **OPTIONS).tokens
    most, tree = shapes[0]
    assert most == 5 and list(tree.parents) == [-1, 0, 0, 1, 1, 3]
    assert tree.tokens[1] != tree.tokens[2] and tree.tokens[3] != tree.tokens[4]
    assert all(len(tree) - 1 <= most for most, tree in shapes)


def test_how_much_is_guessed_follows_from_costs_and_changes_no_draft(monkeypatch):
    """Seven guesses for each of sixteen rows, where a pass of the copy costs by its tokens; or
    drafts that depend on what was guessed."""
    llm = tiny()
    budgets, drafts, propose = {}, {}, _Session.propose
    for guesses in (0, 3, 16):
        said, made = budgets.setdefault(guesses, []), drafts.setdefault(guesses, [])

        class Fixed(CostAwareSession):
            def budget(self, rooms, beside=0, said=said, guesses=guesses):
                said.append(rooms)
                return Budget([min(guesses, room) for room in rooms])

        def watched(self, rows, texts, budget, made=made):
            found = propose(self, rows, texts, budget)
            made.append([draft.tree.tokens for draft in found])
            return found

        with monkeypatch.context() as patch:
            patch.setattr(quantised, "CostAwareSession", Fixed)
            patch.setattr(_Session, "propose", watched)
            llm.generate([PROMPT, PROMPT[5:]], draft=Quantised("int4"), **fixed(6), **OPTIONS)
    assert drafts[0] == drafts[3] == drafts[16]
    assert len(budgets[0]) > len(budgets[16]), "guesses save passes of the copy"


def test_a_pass_of_the_copy_is_one_call(monkeypatch):
    """Its tokens, its layers, its head and its likeliest tokens called one by one, which costs a
    quarter of a millisecond a pass."""
    llm, calls = tiny(), []
    plain = llm.generate(PROMPT, draft=None, **OPTIONS)
    copy = copy_in(llm.model, "auto")
    scored = LayeredModel.scored

    def counted(self, tokens, cache, layout, ranks=0, collectors=()):
        found = scored(self, tokens, cache, layout, ranks, collectors)
        if self is copy:
            calls.append(found.best)
        return found

    monkeypatch.setattr(LayeredModel, "scored", counted)
    drafted = llm.generate(PROMPT, draft=Quantised(), **fixed(5), **OPTIONS)
    assert drafted.tokens == plain.tokens and calls
    assert all(len(tokens) == 7 for best in calls for tokens in best), "as many as guesses need"


def test_a_copy_whose_logits_are_no_numbers_fails_nothing(monkeypatch):
    """A token of -1, which stands for none, as a guess."""
    llm = tiny()
    plain = llm.generate(PROMPT, draft=None, **OPTIONS)
    copy, scored = copy_in(llm.model, "auto"), LayeredModel.scored

    def broken(self, tokens, *more):
        found = scored(self, tokens, *more)
        if self is not copy:
            return found
        best = [[BROKEN] * len(each) for each in found.best]
        return Scored(found.states, torch.full_like(found.logits, torch.nan), best)

    monkeypatch.setattr(LayeredModel, "scored", broken)
    assert llm.generate(PROMPT, draft=Quantised(), **fixed(5), **OPTIONS).tokens == plain.tokens


def test_what_guessing_costs_is_known_to_the_next_request():
    """Each request trying again how much to guess, within its few rounds."""
    llm = tiny()
    for _ in range(2):
        llm.generate(PROMPT, draft="quantised", **fixed(5), **OPTIONS)
    copy = copy_in(llm.model, "auto")
    known = copy.once((CostModel, "hybrid"), CostModel)
    assert known.passes.known and known.drafting.known


@pytest.mark.parametrize(
    ("name", "options"), [("early-exit", {"layer": 2}), ("layer-skip", {"mlp": (1, 2)})]
)
def test_a_plan_of_the_copy(name, options):
    """A plan that runs the model's own weights though a copy was asked for; states of the copy
    taken over by the verification."""
    llm, exits, ran = tiny(), [], []
    propose = LayerSession.propose

    def watched(self, rows, texts, budget):
        drafts = propose(self, rows, texts, budget)
        exits.extend(draft.exits for draft in drafts)
        ran.append(self.target.model)
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerSession, "propose", watched)
        options = {**options, "weights": "int4"}
        found = llm.generate(PROMPT, draft=name, draft_options=options, **fixed(4), **OPTIONS)
    assert found.tokens == llm.generate(PROMPT, draft=None, **OPTIONS).tokens
    assert set(exits) == {None} and set(ran) == {copy_in(llm.model, "int4")}


def test_a_part_and_a_copy_are_not_combined():
    """A part that meets states of other weights than it was trained beside."""
    model = tiny().model
    target = Target(model, model.new_cache(1, 64))
    for drafter in (
        EarlyExit(part=tiny_adapter(model), weights="int8"),
        LayerSkip(part=tiny_lora(model), weights="int8"),
    ):
        with pytest.raises(OptionError, match="weights='int8' and a part"):
            drafter.start(target)


def test_weights_that_were_4_bit_blocks_are_those_blocks_again():
    """Blocks of a file (scale, minimum, 16 levels, both ends in use) that are rounded once more:
    the copy would be of another model than the file."""
    dice = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 16, (96, 4, 32), generator=dice)
    numbers[..., 0], numbers[..., 1] = 0, 15
    scale = torch.rand(96, 4, 1, generator=dice).half().float()
    minimum = -torch.rand(96, 4, 1, generator=dice).half().float()
    weight = (minimum + scale * numbers).flatten(1)
    assert Int4([weight], [None]).rows(torch.arange(96)).equal(weight)

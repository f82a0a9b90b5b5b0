"""Multiple-choice accuracy of every exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.paper.choices import Choice, choice_scores, choose_by_exit, read_choices
from selfspec import LLM
from selfspec.errors import OptionError
from selfspec.lossy import first_layers
from selfspec.testing import tiny_model, tiny_tokenizer

QUESTIONS = [
    Choice(f"question {number}: which", choices, 0)
    for number, choices in enumerate(
        [("one", "another one"), ("x y", "zz", "q"), ("long and longer", "no")]
    )
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


def by_transformers(model: PreTrainedModel, question: Choice) -> list[float]:
    """The choices' log-probabilities by transformers' own forward."""
    tokenizer, found = tiny_tokenizer(), []
    start = len(tokenizer(question.question)["input_ids"])
    for choice in question.choices:
        ids = tokenizer(f"{question.question} {choice}", return_tensors="pt")["input_ids"]
        logs = model(ids).logits[0, :-1].log_softmax(-1)
        found.append(float(logs.gather(1, ids[0, 1:, None])[start - 1 :].sum()))
    return found


def test_scores_are_those_of_transformers_and_of_models_cut_off_there(
    model: PreTrainedModel,
) -> None:
    """A choice scored one token off, with the question's tokens in the sum, or by an exit whose
    layers ran twice."""
    llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    for question in QUESTIONS:
        found = choice_scores(llm, question, [1, 2, 3, 4])
        assert [each[4] for each in found] == pytest.approx(
            by_transformers(model, question), rel=1e-4
        )
        for layer in (1, 3):
            alone = choice_scores(llm.view(first_layers(llm.model, layer)), question, [layer])
            assert [each[layer] for each in found] == pytest.approx(
                [each[layer] for each in alone], rel=1e-5
            )


def test_the_best_choice_counts(model: PreTrainedModel) -> None:
    """By the sum, and by the sum a byte; the worst one chosen, or the two exchanged, would show."""
    llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    for question in QUESTIONS:
        scores = by_transformers(model, question)
        shares = [
            score / len(choice.encode())
            for score, choice in zip(scores, question.choices, strict=True)
        ]
        for answer in range(len(question.choices)):
            (found,) = choose_by_exit(
                llm, [Choice(question.question, question.choices, answer)], [4]
            )
            assert found.accuracy == (answer == scores.index(max(scores))), (question, scores)
            assert found.accuracy_by_length == (answer == shares.index(max(shares)))


def test_exits_that_add_nothing_score_alike(model: PreTrainedModel) -> None:
    """Exits run one after another on one cache; a layer run twice or left out would change the
    later ones."""
    silent = tiny_model()
    for layer in silent.model.layers[2:]:
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data.zero_()
    found = choose_by_exit(LLM.from_pretrained(silent, tokenizer=tiny_tokenizer()), QUESTIONS)
    assert [each.layers for each in found] == [1, 2, 3, 4]
    assert len({(each.accuracy, each.accuracy_by_length) for each in found[1:]}) == 1
    assert found[0].chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3) and found[0].questions == 3


def test_questions_are_read_with_any_kind_of_answer(tmp_path: Path) -> None:
    """Data sets write the answer as a number, a letter or the text; read wrongly, accuracy is
    chance."""
    rows = [
        {"question": "q", "choices": ["a1", "b1"], "answer": answer} for answer in (1, "B", "b1")
    ]
    path = tmp_path / "choices.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert read_choices(path) == [Choice("q", ("a1", "b1"), 1)] * 3


@pytest.mark.parametrize("answer", [2, -1, "C", "c1", True, None])
def test_an_answer_that_is_no_choice_names_its_line(tmp_path: Path, answer: object) -> None:
    """Counted as wrong it would only lower the accuracy, and nobody would look."""
    path = tmp_path / "choices.jsonl"
    rows = [{"question": "q", "choices": ["a1", "b1"], "answer": given} for given in (0, answer)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(OptionError, match=r"choices\.jsonl, line 2"):
        read_choices(path)


def test_bad_files_and_exits(tmp_path: Path, model: PreTrainedModel) -> None:
    """No file, an empty one, an exit that is not there."""
    (tmp_path / "empty.jsonl").touch()
    for name, said in (("empty.jsonl", "holds no question"), ("none.jsonl", "no file")):
        with pytest.raises(OptionError, match=said):
            read_choices(tmp_path / name)
    llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    with pytest.raises(OptionError, match="choose 1 to 4"):
        choose_by_exit(llm, QUESTIONS, [5])
    with pytest.raises(OptionError, match="without a tokenizer"):
        choose_by_exit(LLM(llm.model, None, "bare"), QUESTIONS)
    assert torch.is_grad_enabled()  # inference mode does not leak out

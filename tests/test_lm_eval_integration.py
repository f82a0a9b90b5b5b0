"""Our engine under EleutherAI's lm-eval, compared with its own Hugging Face model on the same
weights. Needs lm-eval."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from selfspec import LLM
from selfspec.errors import OptionError, Unavailable
from selfspec.integrations import lm_eval as ours
from selfspec.integrations.lm_eval import lm_eval_model
from selfspec.lossy import early_exit_generate
from selfspec.testing import tiny_model, tiny_tokenizer

PAIRS = [
    ("some context", " a continuation"),
    ("a", "b"),
    ("", "starts anew"),
    ("ends in a blank ", "word"),
    ("x" * 300, "y" * 300),
]


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError from the depths of another package."""
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    ours._model_class.cache_clear()
    llm = LLM.from_pretrained(tiny_model(), tokenizer=tiny_tokenizer())
    with pytest.raises(Unavailable, match=r"pip install 'selfspec\[lm-eval\]'"):
        lm_eval_model(llm)
    with pytest.raises(OptionError, match="choose 1 to 3"):
        lm_eval_model(llm, layer=9)
    with pytest.raises(OptionError, match="without a tokenizer"):
        lm_eval_model(LLM(llm.model, None, "bare"))
    ours._model_class.cache_clear()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    pytest.importorskip("lm_eval")
    return tiny_model()


@pytest.fixture(scope="module")
def llm(model: PreTrainedModel) -> LLM:
    return LLM.from_pretrained(model, tokenizer=tiny_tokenizer())


@pytest.fixture(scope="module")
def theirs(model: PreTrainedModel) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=1, max_length=512)


def requests(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


def test_log_likelihoods_are_those_of_lm_evals_own_model(llm: LLM, theirs: Any) -> None:
    """A continuation scored one token off, or cut at the wrong end where the text is longer than
    the context."""
    found = lm_eval_model(llm).loglikelihood(requests("loglikelihood", PAIRS))
    expected = theirs.loglikelihood(requests("loglikelihood", PAIRS))
    for (sum_, greedy), (wanted, wanted_greedy) in zip(found, expected, strict=True):
        assert sum_ == pytest.approx(wanted, rel=1e-4) and greedy == wanted_greedy


def test_perplexities_too(llm: LLM, theirs: Any) -> None:
    """A text longer than the context is read in windows; each token counts once."""
    texts = [("a short text",), ("a long text " * 100,)]
    found = lm_eval_model(llm).loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    assert found == pytest.approx(
        theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts)), rel=2e-3
    )


def test_generation_stops_where_it_should_and_drafts_change_nothing(llm: LLM, theirs: Any) -> None:
    """Stop strings and limits of the task; a drafter only for speed."""
    wishes = [
        ("some text", {"until": ["e"], "max_gen_toks": 24}),
        ("more", {"until": [], "max_gen_toks": 7}),
    ]
    expected = theirs.generate_until(requests("generate_until", wishes))
    for options in ({"draft": None}, {"draft": "ngram"}):
        assert (
            lm_eval_model(llm, **options).generate_until(requests("generate_until", wishes))
            == expected
        )
    sampled = [
        (
            "some text",
            {"until": [], "max_gen_toks": 9, "do_sample": True, "temperature": 1.0, "seed": 5},
        )
    ]
    assert lm_eval_model(llm).generate_until(requests("generate_until", sampled)) != expected[:1]


def test_an_exit_is_scored_as_the_shallow_model(llm: LLM) -> None:
    """The whole model scored under an exit's name would make every exit look perfect."""
    shallow = lm_eval_model(llm, layer=2)
    written = shallow.generate_until(
        requests("generate_until", [("some text", {"until": [], "max_gen_toks": 6})])
    )
    assert written == [early_exit_generate(llm, "some text", 2, max_new_tokens=6).text]
    whole, early = (
        each.loglikelihood(requests("loglikelihood", PAIRS[:1]))[0][0]
        for each in (lm_eval_model(llm, layer=4), shallow)
    )
    assert early != pytest.approx(whole, rel=1e-3)
    assert (
        lm_eval_model(llm, layer=4).loglikelihood(requests("loglikelihood", PAIRS[:1]))[0][0]
        == whole
    )


def test_a_whole_evaluation_runs(llm: LLM, tmp_path: Path) -> None:
    """Their evaluator asks for more than the methods above: ranks, names, a cache hook."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = tmp_path / "data.jsonl"
    rows = [
        {"question": f"which one, {number}?", "choices": ["this", "that"], "answer": number % 2}
        for number in range(4)
    ]
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "own.yaml").write_text(
        f"task: own_choices\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{data}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: "
        "choices\ndoc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n",
        encoding="utf-8",
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = simple_evaluate(
        lm_eval_model(llm), tasks=["own_choices"], task_manager=manager, bootstrap_iters=0
    )
    assert (
        0 <= found["results"]["own_choices"]["acc,none"] <= 1
        and found["n-samples"]["own_choices"]["effective"] == 4
    )

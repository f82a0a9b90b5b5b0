"""What an answer is worth: ROUGE, exact match, the number at the end of a sum, a program that
passes its tests.

ROUGE is rouge-score's without stemming, F-measure, as torchmetrics has it, which LayerSkip used.
pass@k is the unbiased estimator 1 - C(n - c, k) / C(n, k) of "Evaluating Large Language Models
Trained on Code" (Chen et al., 2021), section 2.1, for c right ones among n samples. A text is
judged, never tokens. Knows no model and no timing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from statistics import fmean
from typing import Any

from benchmarks.paper.sandbox import Ran, run_python
from selfspec.bench.multiple_choice import chosen
from selfspec.errors import OptionError, Unavailable

ROUGE = ("rouge1", "rouge2", "rougeL")
CODE_STOPS = (
    "\nclass",
    "\ndef",
    "\n#",
    "\nif",
    "\nprint",
    "\n```",
    "\n@",
)  # where a function's body is over (Chen et al., and fences)
SUMMARY_STOPS = ("\nArticle:",)  # a base model goes on with the next example
REFERENCES = ("highlights", "summary", "canonical_solution", "answer", "reference")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
FENCE = re.compile(r"```(?:[a-zA-Z0-9_+-]*)\n(.*?)(?:```|\Z)", re.DOTALL)

Answers = Mapping[str, Sequence[str]]  # of each question: one text, or several samples
Golds = Mapping[str, Mapping[str, Any]]
Values = dict[str, float]


def rouge(pairs: Iterable[tuple[str, str]]) -> Values:
    """Mean F-measures of (text, reference) pairs."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise Unavailable("ROUGE needs rouge-score: pip install rouge-score") from error
    scorer = RougeScorer(list(ROUGE), use_stemmer=False)
    found = [scorer.score(reference, text) for text, reference in pairs]
    return {name: fmean(each[name].fmeasure for each in found) for name in ROUGE}


def exact_match(text: str, reference: str) -> bool:
    """Equal but for blanks at the ends and how many there are in between."""
    return text.split() == reference.split()


def number_in(text: str) -> Decimal | None:
    """The answer of a sum: the number after `####`, else after the last "answer is", else the last
    one there is."""
    for mark in ("####", "answer is", "answer:"):
        _, found, rest = text.lower().rpartition(mark)
        if found and (numbers := NUMBER.findall(rest)):
            return _decimal(numbers[0])
    numbers = NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that at least one of k samples is right, estimated without bias from all of
    them."""
    if not 0 < k <= samples:
        raise OptionError(
            f"pass@{k} cannot be estimated from {samples} samples a problem; draw at least {k}"
        )
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def program_of(answer: str, gold: Mapping[str, Any]) -> str:
    """The program that tests an answer: HumanEval's (prompt, test, entry_point) or MBPP's
    (test_list)."""
    fenced = FENCE.findall(answer)
    if "test_list" in gold:
        setup = [gold.get("test_setup_code") or "", *gold.get("test_imports", ())]
        return "\n".join([*setup, fenced[0] if fenced else answer, *gold["test_list"]])
    entry, prompt = gold["entry_point"], gold["prompt"]
    whole = next((code for code in fenced if f"def {entry}" in code), None)
    if whole is None and f"def {entry}" in answer:
        whole = answer
    if (
        whole is not None
    ):  # the function anew, from a chat: what stands before it in the prompt still counts
        program = prompt.partition(f"def {entry}")[0] + "\n" + whole
    else:
        program = prompt + cut(fenced[0] if fenced else answer, CODE_STOPS)
    return f"{program}\n\n{gold['test']}\n\ncheck({entry})\n"


def cut(text: str, stops: Iterable[str]) -> str:
    """The text before the first of these."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def code(answers: Answers, golds: Golds, run: Callable[[str], Ran] = run_python) -> Values:
    """pass@1, and pass@10 where there are ten samples a problem. Runs what the model wrote; see
    sandbox.py."""
    counts = []
    for question, texts in answers.items():
        counts.append(
            (len(texts), sum(run(program_of(text, golds[question])).passed for text in texts))
        )
    fewest = min(samples for samples, _ in counts)
    return {
        f"pass@{k}": fmean(pass_at_k(*count, k) for count in counts) for k in (1, 10) if k <= fewest
    }


def summaries(answers: Answers, golds: Golds) -> Values:
    """ROUGE of every text with its reference summary."""
    return rouge(
        (cut(text, SUMMARY_STOPS), reference_of(golds[question]))
        for question, texts in answers.items()
        for text in texts
    )


def reference_of(gold: Mapping[str, Any]) -> str:
    """The text that an answer is compared with: CNN/DM's, XSum's, HumanEval's, or what a file of
    one's own calls it."""
    named = next((name for name in REFERENCES if gold.get(name)), None)
    if named is None:
        raise OptionError(
            f"there is nothing to compare answers with: the question has none of "
            f"{', '.join(REFERENCES)}"
        )
    return str(gold[named])


def accuracy(answers: Answers, golds: Golds) -> Values:
    """Share of right letters where there are choices, else of right final numbers."""
    if "choices" not in golds[next(iter(answers))]:
        return sums(answers, golds)
    right = [
        chosen(text, golds[question]["choices"]) == golds[question]["answer"]
        for question, texts in answers.items()
        for text in texts
    ]
    return {"accuracy": fmean(right)}


def sums(answers: Answers, golds: Golds) -> Values:
    """Share of right final numbers."""
    pairs = [
        (number_in(text), number_in(str(golds[question]["answer"])))
        for question, texts in answers.items()
        for text in texts
    ]
    return {"accuracy": fmean(found is not None and found == wanted for found, wanted in pairs)}


def matches(answers: Answers, golds: Golds) -> Values:
    """Share of exact matches with the reference answer."""
    pairs = [
        (text, str(golds[question]["answer"]))
        for question, texts in answers.items()
        for text in texts
    ]
    return {"exact match": fmean(exact_match(*pair) for pair in pairs)}


MEASURES: Mapping[str, Callable[[Answers, Golds], Values]] = {
    **dict.fromkeys(ROUGE, summaries),
    "pass@1": code,
    "pass@10": code,
    "accuracy": accuracy,
    "exact match": matches,
}


def judge(answers: Answers, golds: Golds, wanted: Iterable[str]) -> Values:
    """Those of the wanted measures that these questions allow: tests need code, accuracy a number,
    the others a reference."""
    found: Values = {}
    first = golds[next(iter(answers))]
    for name in wanted:
        measure = MEASURES.get(name)
        if measure is not None and name not in found and _allows(measure, first):
            found |= measure(answers, golds)
    return {name: value for name, value in found.items() if name in set(wanted)}


def check_answers(task: str, golds: Golds, wanted: Iterable[str]) -> None:
    """Refuse questions that none of the wanted measures can judge, before any is answered."""
    measures = [MEASURES[name] for name in wanted if name in MEASURES]
    bare = [
        question
        for question, gold in golds.items()
        if measures and not any(_allows(measure, gold) for measure in measures)
    ]
    if bare:
        raise OptionError(
            f"{bare[0]} has no answer to compare with ({len(bare)} of {len(golds)} questions of "
            f"{task}), so the table could not judge it; give its lines an 'answer', or leave them "
            "out"
        )


def _allows(measure: Callable[[Answers, Golds], Values], gold: Mapping[str, Any]) -> bool:
    tested = "entry_point" in gold or "test_list" in gold
    if measure is code:
        return tested
    if measure is summaries:
        return any(gold.get(name) for name in REFERENCES)
    if measure is matches and "choices" in gold:
        return False
    return not tested and bool(gold.get("answer"))

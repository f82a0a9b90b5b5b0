"""The law of a tiny model's sampled texts, and how far a sample of texts is from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from selfspec import LLM, SamplingParams
from selfspec.core.sampling import Sampler

Law = dict[tuple[int, ...], float]


def law_of_texts(llm: LLM, prompt: Sequence[int], sampling: SamplingParams, length: int) -> Law:
    """The probability of every text of `length` tokens, by the model's own processed
    distribution."""
    sampler, law = Sampler(sampling), {(): 1.0}
    for _ in range(length):
        texts = [[*prompt, *text] for text in law]
        logits = llm.model.prefill(texts, llm.model.new_cache(len(texts), len(prompt) + length))
        rows = sampler.probabilities(logits, texts)
        law = {
            (*text, int(token)): chance * float(row[token])
            for (text, chance), row in zip(law.items(), rows, strict=True)
            for token in row.nonzero().flatten()
        }
    return law


def chi_square(texts: Iterable[Sequence[int]], law: Law) -> float:
    """Of these texts; infinite if one of them is impossible. Texts that are expected less than
    twice count as one."""
    found = Counter(tuple(text) for text in texts)
    if not found.keys() <= law.keys():
        return math.inf
    count, rare = found.total(), [text for text in law if found.total() * law[text] < 2]
    cells = [(found[text], count * law[text]) for text in law.keys() - set(rare)]
    if rare:
        cells.append((sum(found[text] for text in rare), count * sum(law[text] for text in rare)))
    return sum((seen - expected) ** 2 / expected for seen, expected in cells)

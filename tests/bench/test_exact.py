"""`scripts/bench exact`: does it see a wrong bit, and does it read the same text however it reads
it?"""

from __future__ import annotations

import torch

from benchmarks.exact import compare, fingerprint, pieces, read, read_together
from selfspec.testing import tiny_llm


def test_a_fingerprint_sees_one_bit_and_knows_its_row() -> None:
    """Catches a fingerprint that rounds, or that mixes rows, so that differing logits would be
    called the same."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    changed = logits.clone()
    changed[1].view(torch.int32)[7] ^= 1
    assert (fingerprint(logits) != fingerprint(changed)).tolist() == [False, True, False]


def test_a_fingerprint_depends_on_where_a_value_stands() -> None:
    """Catches a plain sum of bits, for which swapped logits are the same. It also tells -0.0 from
    0.0."""
    row = torch.tensor([[1.0, 2.0, 0.0]])
    assert fingerprint(row) != fingerprint(row[:, [1, 0, 2]])
    assert fingerprint(row) != fingerprint(torch.tensor([[1.0, 2.0, -0.0]]))


def test_texts_are_a_little_shorter_one_by_one() -> None:
    """The documented eight texts of sixty tokens had two that were empty."""
    assert [len(each) for each in pieces(range(480), 8, 60)] == [60, 57, 54, 51, 48, 45, 42, 39]
    assert [each[-1] for each in pieces(range(10500), 5, 2100)] == [2099, 4186, 6273, 8360, 10447]
    assert all(len(each) >= 1 for each in pieces(range(3), 3, 1))


def test_pieces_cover_the_text_once_and_in_order() -> None:
    """Catches a reader that skips, repeats or reorders positions: prints are compared by index."""
    model = tiny_llm().model
    text = torch.arange(5, 25)
    whole = read(model, text, iter([20]))
    assert len(whole) == 20 and len(set(whole.tolist())) == 20
    assert torch.equal(read(model, text, iter([3, 9, 100])), whole), (
        "the native kernels promise this"
    )


def test_rows_of_a_batch_keep_their_own_prints() -> None:
    """Catches prints given to the wrong row where rows advance by different steps, some by none."""
    model = tiny_llm().model
    texts = [torch.arange(5, 17), torch.arange(40, 45), torch.arange(60, 69)]
    steps = iter([2, 0, 3, 1, 4, 0, *[4] * 30])
    together = read_together(model, texts, steps)
    for prints, text in zip(together, texts, strict=True):
        assert torch.equal(prints, read(model, text, iter([len(text)])))


class Lying:
    """A model whose logits depend on how many tokens are read together: the fault that the
    benchmark is there to find."""

    def __init__(self) -> None:
        self.real = tiny_llm().model

    def new_cache(self, rows: int, capacity: int):  # type: ignore[no-untyped-def]
        return self.real.new_cache(rows, capacity)

    def forward(self, tokens, cache, place):  # type: ignore[no-untyped-def]
        logits = self.real.forward(tokens, cache, place)
        if len(tokens) == 1:
            logits.view(torch.int32)[:, 0] ^= 1
        return logits


def test_a_model_that_depends_on_company_is_found_out() -> None:
    """Catches a comparison that cannot fail: with one wrong bit in single steps, each of their
    positions has to be counted."""
    texts = [torch.arange(5, 15), torch.arange(20, 26)]
    quiet = lambda items, _: items  # noqa: E731
    found = compare(Lying(), texts, quiet)  # type: ignore[arg-type]
    assert found["single steps"] == 16
    assert set(compare(tiny_llm().model, texts, quiet).values()) == {0}

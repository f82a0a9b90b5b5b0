"""From files to blocks: which tokens, which of them are trained, what is held out, and what is said
about bad files."""

from __future__ import annotations

import json
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfspec import DataError, TrainingError
from selfspec.testing import tiny_tokenizer
from selfspec.train.data import IGNORED, Blocks, DataOptions, load_data, pack, pad


def write(folder: Path, *lines: Any, name: str = "data.jsonl") -> list[Path]:
    path = folder / name
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return [path]


def shown(blocks: Blocks, tokenizer: Any) -> list[tuple[str, str]]:
    """Of each block its text, and the part of it that is trained."""
    return [
        (tokenizer.decode(ids), tokenizer.decode(ids[flags]))
        for ids, flags in zip(blocks.ids, blocks.trained, strict=True)
    ]


def both(data: Any, tokenizer: Any) -> list[tuple[str, str]]:
    return sorted([*shown(data.train, tokenizer), *shown(data.held_out, tokenizer)])


def test_plain_text_is_trained_whole_and_ends(tmp_path: Path) -> None:
    """A document without an end runs into the next one, and the model never learns to stop."""
    tokenizer = tiny_tokenizer()
    data = load_data(
        write(tmp_path, {"text": "abc"}, {"text": "de"}),
        tokenizer,
        DataOptions(length=8, packing=False),
    )
    end = tokenizer.eos_token
    assert both(data, tokenizer) == [("abc" + end * 5, "abc" + end), ("de" + end * 6, "de" + end)]
    assert data.examples == 2 and len(data.held_out) == 1


def test_only_answers_are_trained_and_in_the_template(tmp_path: Path) -> None:
    """Prompts that are trained too, an answer whose end is not, or text that is not written as the
    model will meet it."""
    tokenizer = tiny_tokenizer()
    options = DataOptions(length=128, packing=False)
    talk = [
        {"role": r, "content": c}
        for r, c in [("user", "hi"), ("assistant", "ho"), ("user", "more"), ("assistant", "yes")]
    ]
    data = load_data(
        write(tmp_path, {"prompt": "hi", "response": "ho"}, {"messages": talk}), tokenizer, options
    )
    short, long = sorted(both(data, tokenizer), key=lambda pair: len(pair[1]))
    assert short[0].startswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    )
    assert short[1] == "ho<|im_end|>\n"
    assert long[0].startswith(
        short[0].rstrip("<|im_end>\n")
        + "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant"
    )
    assert long[1] == "ho<|im_end|>\nyes<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, tokenize=True)[
        "input_ids"
    ]
    assert any(
        blocks.ids[0, : len(prompt)].tolist() == prompt for blocks in (data.train, data.held_out)
    ), "as at use"


def test_without_a_template_prompts_and_answers_are_plain(tmp_path: Path) -> None:
    """A template made up for a model that has none."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    lines = [{"prompt": "2+2=", "response": "4"}, {"prompt": "3+3=", "response": "6"}]
    data = load_data(write(tmp_path, *lines), tokenizer, DataOptions(length=8, packing=False))
    assert {text[:5] for text, _ in both(data, tokenizer)} == {"2+2=4", "3+3=6"}
    assert {trained for _, trained in both(data, tokenizer)} == {"4<|im_end|>", "6<|im_end|>"}
    prompts = load_data(
        write(tmp_path, *lines),
        tokenizer,
        DataOptions(length=8, packing=False, train_on_prompts=True),
    )
    assert {trained for _, trained in both(prompts, tokenizer)} == {
        "2+2=4<|im_end|>",
        "3+3=6<|im_end|>",
    }
    with pytest.raises(TrainingError, match="no chat template"):
        load_data(
            write(tmp_path, {"messages": [{"role": "user", "content": "x"}]}),
            tokenizer,
            DataOptions(),
        )


def test_a_template_can_be_left_out(tmp_path: Path) -> None:
    """A model for one task is given the bare prompt later: trained inside a template it would not
    know it."""
    tokenizer = tiny_tokenizer()
    options = DataOptions(length=8, packing=False, chat_template=False)
    data = load_data(
        write(tmp_path, {"prompt": "hi", "response": "ho"}, {"prompt": "a", "response": "b"}),
        tokenizer,
        options,
    )
    assert ("hiho" + tokenizer.eos_token * 4, "ho" + tokenizer.eos_token) in both(data, tokenizer)


def test_packing_keeps_examples_whole() -> None:
    """An answer cut off from its prompt is trained as noise; tokens lost, trained twice, or filler
    that is trained."""
    some = [
        ([1, 2], [False, True]),
        ([3, 4, 5, 6, 7], [True] * 5),
        ([8], [True]),
        ([], []),
        ([9, 10, 11], [False, False, True]),
    ]
    blocks = pack(some, 4, filler=0)
    assert blocks.ids.tolist() == [[3, 4, 5, 6], [7, 9, 10, 11], [1, 2, 8, 0]], (
        "only what is longer than a block is cut"
    )
    assert blocks.trained.tolist() == [
        [True] * 4,
        [True, False, False, True],
        [False, True, True, False],
    ]
    assert blocks[2]["labels"].tolist() == [IGNORED, 2, 8, IGNORED]
    assert blocks.tokens == 6, "the first token of a block is predicted by none"
    assert pad([([1, 2, 3, 4, 5], [True] * 5), ([6], [True])], 4, filler=9).ids.tolist() == [
        [1, 2, 3, 4],
        [6, 9, 9, 9],
    ]


@given(st.lists(st.integers(1, 25), min_size=1, max_size=60))
def test_packing_wastes_little(sizes: list[int]) -> None:
    """Every example in exactly one block and in one piece, and no two blocks that would have fitted
    into one."""
    blocks = pack(
        [([number] * size, [True] * size) for number, size in enumerate(sizes, 1)], 25, filler=0
    )
    runs = [
        [(key, len(list(some))) for key, some in groupby(row) if key] for row in blocks.ids.tolist()
    ]
    assert sorted(chain(*runs)) == list(enumerate(sizes, 1))
    assert all(row == sorted(row) for row in runs), (
        "examples of a length would always stand at the same end of a block"
    )
    used = sorted(sum(size for _, size in row) for row in runs)
    assert len(used) == 1 or used[0] + used[1] > 25


def test_held_out_text_is_not_trained(tmp_path: Path) -> None:
    """Measuring on text that was trained, or another split after a resume. A text file is cut so
    that it can be split."""
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {number:04d}\n" for number in range(200)), encoding="utf-8")
    options = DataOptions(length=50, held_out=0.2, seed=4)
    data, again = (load_data([path], tiny_tokenizer(), options) for _ in range(2))
    assert data.examples == 41 and len(data.held_out) == 8
    train, held = (
        {tuple(row) for row in blocks.ids.tolist()} for blocks in (data.train, data.held_out)
    )
    assert not train & held
    assert again.train.ids.equal(data.train.ids)
    other = load_data([path], tiny_tokenizer(), DataOptions(length=50, held_out=0.2, seed=5))
    assert not other.train.ids.equal(data.train.ids)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"body": "a"}\n', r"columns 'body', none of which can be trained on: it needs 'text'"),
        ('{"text": 3}\n', "columns 'text'"),
        ('{"text": "a"}\n', "1 examples with 2 tokens"),
        ('{"messages": [{"role": "user"}]}\n', "message 0: content=None is no text"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n' * 3, "no token to"),
        (
            '{"prompt": "a long one, longer than a block", "response": "b"}\n' * 3,
            "beyond the 16 tokens",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str, words: str) -> None:
    """A crash deep inside the trainer, or a run that trains on nothing, instead of the file and
    line that are wrong."""
    path = tmp_path / "data.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(TrainingError, match=words):
        load_data([path], tiny_tokenizer(), DataOptions(length=16, packing=False))


def test_other_bad_input(tmp_path: Path) -> None:
    """Files that are missing or no text, options that leave nothing, a template that cannot be
    followed."""
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError, match="cannot be read"):
        load_data([tmp_path / "missing.jsonl"], tokenizer, DataOptions())
    (tmp_path / "noise.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        load_data([tmp_path / "noise.txt"], tokenizer, DataOptions())
    fine = write(tmp_path, *[{"body": "abc"}] * 4)
    assert load_data(fine, tokenizer, DataOptions(length=8, text_column="body")).examples == 4
    with pytest.raises(TrainingError, match=r"held_out=0\.0"):
        DataOptions(held_out=0.0)
    with pytest.raises(TrainingError, match="length=2"):
        DataOptions(length=2)
    tokenizer.chat_template = "{{ messages | length }}: {{ messages[-1]['content'] }}"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(TrainingError, match="rewrites earlier messages"):
        load_data(write(tmp_path, {"messages": talk}), tokenizer, DataOptions())
    tokenizer.eos_token = None
    with pytest.raises(TrainingError, match="no end-of-sequence token"):
        load_data(fine, tokenizer, DataOptions())

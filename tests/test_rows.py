"""Rows of text from files and datasets, and what is said about sources that are wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from selfspec import DataError, Unavailable
from selfspec.core.text_rows import read_rows, require


def test_lines_keep_their_place(tmp_path: Path) -> None:
    """An error that names line 2 where an editor shows line 3: blank lines count, but are no rows;
    a text cut in two at a separator that JSON allows."""
    path = tmp_path / "some.jsonl"
    path.write_text('{"a": 1}\n\n{"a": "\\u00e9"}\r\n{"a": "b\u2028c"}\n', encoding="utf-8")
    assert list(read_rows(path)) == [
        (f"{path}:1", {"a": 1}),
        (f"{path}:3", {"a": "é"}),
        (f"{path}:4", {"a": "b\u2028c"}),
    ]


def test_compressed_and_plain_text(tmp_path: Path) -> None:
    """A compressed JSONL read as one text, or a text file read as JSON."""
    (tmp_path / "some.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n{"a": 2}\n'))
    assert [row for _, row in read_rows(str(tmp_path / "some.jsonl.gz"))] == [{"a": 1}, {"a": 2}]
    (tmp_path / "some.txt").write_text("one\ntwo\n", encoding="utf-8")
    assert [row for _, row in read_rows(tmp_path / "some.txt")] == [{"text": "one\ntwo\n"}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.txt", b"\n\n", "is empty"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2 cannot be read as JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"\\ud800 is half of a pair"),
        ("a.json", b'["a"]\n', r"a\.json:1 is a JSON list"),
        ("a.txt", b"\xff\xfe\x00", "UTF-8"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], "cannot be read"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    """A traceback from json or gzip instead of the file and line that are wrong."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        list(read_rows(tmp_path / name))


def test_missing_files_are_named_before_anything_is_read(tmp_path: Path) -> None:
    """A typing error that is found after the model was loaded, or a hub's name taken for a file."""
    with pytest.raises(DataError, match=r"there is no file .*lost\.jsonl"):
        require([tmp_path, "hf:some/where", tmp_path / "lost.jsonl"])
    with pytest.raises(DataError, match="cannot be read"):
        list(read_rows(tmp_path / "lost.jsonl"))


def test_saved_datasets(tmp_path: Path) -> None:
    """A dataset of several splits read as if it had rows, or rows that lose their columns."""
    datasets = pytest.importorskip("datasets", reason="the extra 'train' is not installed")
    rows = datasets.Dataset.from_list([{"text": "a", "n": 1}, {"text": "b", "n": 2}])
    rows.save_to_disk(tmp_path / "one")
    assert list(read_rows(tmp_path / "one")) == [
        (f"{tmp_path / 'one'}:1", {"text": "a", "n": 1}),
        (f"{tmp_path / 'one'}:2", {"text": "b", "n": 2}),
    ]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match="has the splits train, test"):
        list(read_rows(tmp_path / "two"))
    (tmp_path / "three").mkdir()
    with pytest.raises(DataError, match="cannot be opened"):
        list(read_rows(tmp_path / "three"))


def test_hub_names_take_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split or a configuration that is lost on the way, so that another part of the dataset is
    read."""
    datasets = pytest.importorskip("datasets", reason="the extra 'train' is not installed")
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> object:
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"text": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("hf:own/set", "hf:own/set@test", "hf:own/set#main@test[:5]"):
        assert [row for _, row in read_rows(source)] == [{"text": "a"}]
    assert asked == [
        ("own/set", None, "train"),
        ("own/set", None, "test"),
        ("own/set", "main", "test[:5]"),
    ]


def test_without_the_library_its_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ModuleNotFoundError for a user who only mistyped, or did not know that an extra is
    needed."""
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(Unavailable, match="pip install datasets"):
        list(read_rows("hf:own/set"))

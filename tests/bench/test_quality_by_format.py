"""`scripts/bench quality`: what is read is the model's own loss, every token once; answers are
judged; what was measured is kept; llama.cpp has a row, or the reason why not."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from suite_world import PROVENANCE
from typer.testing import CliRunner

from benchmarks import quality
from benchmarks.quality import (
    Judged,
    QualityRun,
    Way,
    Window,
    expected_of,
    read_window,
    tables,
    windows_of,
)
from selfspec import LLM
from selfspec.bench.peer_host import open_peer
from selfspec.bench.peers import PEERS_FOLDER, PeerSpec
from selfspec.bench.schema import read, write
from selfspec.bench.tasks import Item
from selfspec.errors import SelfspecError
from selfspec.testing import tiny_llm, tiny_model, tiny_tokenizer

needs_kernels = pytest.mark.skipif(
    tiny_llm().model.ops.kernel != "native", reason="kinds of weights need our kernels"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, a text and questions."""
    folder = tmp_path_factory.mktemp("quality")
    tiny_model(hidden_size=64, intermediate_size=128).save_pretrained(folder / "tiny")
    tiny_tokenizer().save_pretrained(folder / "tiny")
    (folder / "text.txt").write_text("a text of some words\n" * 60, encoding="utf-8")
    rows = [{"prompt": f"say {number}", "answer": "yes", "id": number} for number in range(3)]
    (folder / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "model.gguf").write_bytes(b"0" * 1000)
    return folder


def run(*words: object) -> tuple[int, str]:
    """Exit status and output; an error for users as its message."""
    app = typer.Typer()
    app.command()(quality.quality)
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SelfspecError | SystemExit):
        raise done.exception
    said = str(done.exception) if isinstance(done.exception, SelfspecError) else ""
    return done.exit_code, done.output + said


def test_the_loss_is_that_of_transformers() -> None:
    """Targets shifted by one, or a mean where a sum is wanted."""
    ids = [5, 9, 200, 31, 7, 7, 90]
    reference = tiny_model()(torch.tensor([ids]), labels=torch.tensor([ids]))
    loss, said = read_window(tiny_llm().model, ids)
    assert loss == pytest.approx(reference.loss.item() * 6, rel=1e-4)
    assert said == reference.logits[0, :-1].argmax(-1).tolist()


def test_the_loss_of_an_answer_is_that_of_transformers_given_the_question() -> None:
    """The question's own tokens counted, or the answer's first one left out."""
    llm, question = tiny_llm(), [5, 9, 200, 31]
    answer = list(tiny_tokenizer()("yes and no", add_special_tokens=False)["input_ids"])
    item = Item("qa", "qa/0", "", False, {"answer": "yes and no"})
    labels = torch.tensor([[-100] * len(question) + answer])
    found = expected_of(llm, question, "qa", item)
    assert found is not None and found.tokens == len(answer)
    reference = tiny_model()(torch.tensor([question + answer]), labels=labels)
    assert found.loss == pytest.approx(reference.loss.item() * len(answer), rel=1e-4)
    said = reference.logits[0, len(question) - 1 : -1].argmax(-1).tolist()
    assert found.same == sum(a == b for a, b in zip(said, answer, strict=True))
    assert expected_of(llm, question, "gsm8k", item) is None, "its answer is a number"


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 30])
def test_every_token_is_read_once(tmp_path: Path, tokens: int) -> None:
    """Windows that forget the token at a seam, or count it twice; a last one without a token."""
    text = tmp_path / "t.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz" * 2, encoding="utf-8")
    llm = tiny_llm()
    windows = windows_of(llm, text, tokens, 8)
    ids = llm.encode(text.read_text(encoding="utf-8"))
    read_ones = [token for window in windows for token in window[1:]]
    assert len(read_ones) == tokens and ids[-52:][1 : tokens + 1] == read_ones
    assert all(2 <= len(window) <= 9 for window in windows)
    assert [window[0] for window in windows[1:]] == [window[-1] for window in windows[:-1]]


@needs_kernels
def test_kinds_are_measured_judged_and_kept(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of one kind measured with another's weights, a task left out, and a second sitting that
    begins anew."""
    out = tmp_path / "q.json"
    words = ["--model", files / "tiny", "--text", files / "text.txt", "--tokens", 600, "-n", 4,
             "--task", f"jsonl={files / 'qa.jsonl'}", "--sample", 2, "--threads", 1,
             "--weights", "float32,int8,int4", "--out", out]  # fmt: skip
    code, text = run(*words)
    assert code == 0
    result = read(QualityRun, out)
    first, *others = result.ways
    assert [way.name for way in result.ways] == ["float32", "int8", "int4"] and result.complete
    assert (
        first.agreement == 1
        and [sum(w.tokens for w in way.windows) for way in result.ways] == [600] * 3
    )
    assert len({way.loss for way in result.ways}) == 3 and first.bytes > others[0].bytes  # type: ignore[operator]
    llm = LLM.from_pretrained(files / "tiny", weights="int8")
    windows = windows_of(llm, files / "text.txt", 600, 512)
    assert others[0].windows[1].loss == read_window(llm.model, windows[1])[0]
    assert all(len(way.answers["qa"]) == 2 for way in result.ways)
    assert "qa, exact match" in text and "0 of 2" in text and "tiny" in text
    assert "perplexity of qa's right answers" in text
    whole = asdict(result)
    result.ways[1].windows.pop()
    del result.ways[2].answers["qa"]["qa/1"]
    result.complete = False
    write(result, out)
    read_again: list[int] = []
    reading = quality.read_window
    monkeypatch.setattr(
        quality, "read_window", lambda *given: read_again.append(len(given[1])) or reading(*given)
    )
    assert run(*words)[0] == 0
    assert asdict(read(QualityRun, out))["ways"] == whole["ways"]
    assert read_again[:2] == [89, 89], "float32 for comparison, and the one that was missing"
    assert len(read_again) == 3, "one question with its answer"
    assert run("--show", out)[1].strip() in text and "int4" in run("--show", out)[1]


PEER = """
class Peer:
    packages = ()
    def load(self, folder, dtype, threads):
        self.folder = folder
    def read(self, ids):
        FAIL
        return 2.0 * (len(ids) - 1), [0 for _ in ids[1:]]
"""


@needs_kernels
@pytest.mark.parametrize(("fail", "shown"), [("", "7.389"), ("raise ValueError('old file')", "")])
def test_llama_cpp_reads_the_same_windows(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: str, shown: str
) -> None:
    """Its row is of the same tokens; one that fails says why and stops nobody else."""
    (tmp_path / "peer.py").write_text(PEER.replace("FAIL", fail or "pass"), encoding="utf-8")
    monkeypatch.setattr(quality, "find_peers", lambda: {"xllamacpp": PeerSpec("x", tmp_path)})
    out = tmp_path / "q.json"
    words = ["--model", files / "tiny", "--text", files / "text.txt", "--tokens", 20, "--threads",
             1, "--weights", "float32", "--gguf", files / "model.gguf", "--out", out]  # fmt: skip
    code, text = run(*words)
    assert code == 0, text
    own, theirs = read(QualityRun, out).ways
    assert own.windows and theirs.name == "llama.cpp, model.gguf" and theirs.bytes == 1000
    line = next(line for line in text.splitlines() if "llama.cpp" in line)
    assert (shown in line) if shown else ("failed" in line and "old file" in line)
    assert len(theirs.windows) == (1 if shown else 0)


def test_llama_cpp_is_asked_for_each_token_with_what_stands_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt that holds the token that is asked about, or a loss of another token."""
    asked: list[tuple[Any, Any]] = []

    class Server:
        def __init__(self, params: Any) -> None: ...

        def handle_completions(self, request: Any, hear: Callable[[Any], None]) -> None:
            (((token, bias),), prompt) = request["logit_bias"], request["prompt"]
            asked.append((tuple(prompt), token))
            content = {"id": token, "logprob": -token / 10, "top_logprobs": [{"id": 1, "x": 0}]}
            assert bias > 1000 and request["n_predict"] == 1
            hear({"choices": [{"logprobs": {"content": [content]}}]})

    class Anything(types.SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            setattr(self, name, Anything())
            return getattr(self, name)

    fake = types.ModuleType("xllamacpp")
    fake.Server, fake.CommonParams, fake.ggml_type = Server, Anything, Anything()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)
    peer = open_peer(PEERS_FOLDER / "xllamacpp" / "peer.py")
    peer.load("some/model.gguf", "float32", 2)
    assert peer.path == "some/model.gguf", "a file is taken as it is"
    loss, said = peer.read([4, 5, 6])
    assert asked == [((4,), 5), ((4, 5), 6)]
    assert loss == pytest.approx(1.1) and said == [1, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is nothing to measure"),
        (["--task", "humaneval=H"], "allow it with --run-programs"),
        (["--text", "T", "--gguf", "none.gguf"], "no file 'none.gguf'"),
        (["--task", "gsm9k=x"], "did you mean 'gsm8k'"),
    ],
)
def test_refusals(files: Path, tmp_path: Path, words: Sequence[str], said: str) -> None:
    """Programs are never run unasked; a typing error is said before anything is measured."""
    problem = {"task_id": "h/0", "prompt": "def f():\n", "entry_point": "f", "test": ""}
    (tmp_path / "H.jsonl").write_text(json.dumps(problem), encoding="utf-8")
    places = {"humaneval=H": f"humaneval={tmp_path / 'H.jsonl'}", "T": str(files / "text.txt")}
    given = [places.get(word, word) for word in words]
    code, text = run(*given, "--model", files / "tiny", "--out", tmp_path / "out.json")
    assert code in (1, 2) and said in text
    assert not (tmp_path / "out.json").exists()


def test_an_unfinished_way_has_no_figure() -> None:
    """Its perplexity would be of other tokens than those it stands beside."""
    windows = [Window(10, 20.0, 10), Window(10, 30.0, 10)]
    ways = [
        Way("float32", 8, windows, {"gsm8k": {"a": Judged("1", 1.0), "b": Judged("2", 0.0)}}),
        Way("int8", 4, [Window(10, 21.0, 9), Window(10, 31.0, 8)]),
        Way("int4", 2, windows[:1]),
    ]
    run = QualityRun(PROVENANCE, "demo", "t.txt", 20, 10, 8, [], ways)
    lines = tables(run).splitlines()
    cells = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    assert "12.182" in cells["float32"] and "1 of 2" in cells["float32"]
    assert "+10.52%" in cells["int8"] and "85.0%" in cells["int8"]
    assert "unfinished" in cells["int4"] and "%" not in cells["int4"]
    assert lines[0].startswith("demo, 20 tokens of t.txt") and "flatter" in lines[-1]

"""A whole run with made-up peers, and the command's manners. What is measured is never asserted,
only what is made of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_peers import GOOD, generating, write_peer

from benchmarks.command import run_command
from benchmarks.plain.__main__ import check_context, plain
from benchmarks.plain.entries import Entry, entries, source_of
from benchmarks.plain.report import markdown
from benchmarks.plain.results import PeerRow, PlainRun
from benchmarks.plain.run import Paused, PlainBenchmark, PlainOptions, Tokens, new_run, quick, turns
from selfspec.bench.peers import SHIPPED, PeerSpec
from selfspec.bench.prompts import prompt_ids
from selfspec.bench.schema import continued, read
from selfspec.bench.suite import first_difference
from selfspec.bench.suite_run import folder_of
from selfspec.core.options import numbers
from selfspec.errors import OptionError

FICKLE = generating(
    "self.n = getattr(self, 'n', 0) + 1; return [ids[-1] + 1] * (max_new_tokens - 1) + [self.n]"
)
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = PlainOptions(rounds=2, new_tokens=4, prompt_tokens=(3, 6), time_limit=20)


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text[:50]]


def benchmark(folder: Path, options: PlainOptions = OPTIONS) -> tuple[PlainBenchmark, list[str]]:
    ticks: list[str] = []
    run = new_run("tiny", options, ["transformers"])
    return PlainBenchmark(
        run, options, folder, folder / "out.json", ticks.append, lambda text: None
    ), ticks


def rows_of(run: PlainRun) -> dict[str, list[PeerRow]]:
    return {
        name: [row for row in run.peers if row.peer == name]
        for name in {row.peer for row in run.peers}
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainRun, list[str], Path]:
    """One run of six peers, of which two are honest."""
    folder = tmp_path_factory.mktemp("run")
    specs = [
        write_peer(folder, "transformers", GOOD),
        write_peer(folder, "twin", GOOD),
        write_peer(
            folder, "other", generating("return [ids[-1] + 1, ids[-1] + 2, 0, 0][:max_new_tokens]")
        ),
        write_peer(folder, "fickle", FICKLE),
        write_peer(folder, "short", generating("return [1]")),
        write_peer(folder, "absent", "import package_that_is_not_there"),
    ]
    bench, ticks = benchmark(folder)
    bench.peers([Entry(spec) for spec in specs], letters)
    bench.finish()
    return read(PlainRun, bench.out), ticks, folder


def test_every_peer_has_a_row_at_every_length(finished: tuple[PlainRun, list[str], Path]) -> None:
    """Catches a peer that vanishes from the result because it failed, and lengths that are mixed
    up."""
    run, _, _ = finished
    found = {name: [row.prompt_tokens for row in rows] for name, rows in rows_of(run).items()}
    assert found == {
        name: [3, 6] for name in ("transformers", "twin", "other", "fickle", "short", "absent")
    }
    assert run.complete and run.provenance.versions["pytest"] == pytest.__version__


def test_tokens_are_compared_with_the_reference(finished: tuple[PlainRun, list[str], Path]) -> None:
    """Catches 'same tokens: yes' for a peer that wrote something else, wrote it only once, or was
    compared with itself."""
    run, _, _ = finished
    rows = {name: rows[0] for name, rows in rows_of(run).items()}
    assert [
        (rows[name].identical, rows[name].first_difference)
        for name in ("transformers", "twin", "other")
    ] == [(True, None), (True, None), (False, 2)]
    assert rows["fickle"].identical is False and rows["fickle"].first_difference == 1
    assert rows["absent"].identical is None


def test_failures_are_told_in_their_rows(finished: tuple[PlainRun, list[str], Path]) -> None:
    """Catches a run that stops at the first failing peer, and a failure reported without its
    reason."""
    run, _, _ = finished
    rows = {name: rows[1] for name, rows in rows_of(run).items()}
    assert rows["short"].failure == "made 1 tokens where 4 were asked for" and rows[
        "short"
    ].full == [None, None]
    assert (
        rows["absent"].failure == "ModuleNotFoundError: No module named 'package_that_is_not_there'"
    )
    assert rows["twin"].failure is None and len(rows["twin"].full) == len(rows["twin"].first) == 2
    assert "failed: made 1 tokens" in markdown(run)


def test_the_result_has_no_paths_of_this_machine(
    finished: tuple[PlainRun, list[str], Path],
) -> None:
    """Catches folders in a file that is committed."""
    _, _, folder = finished
    text = (folder / "out.json").read_text()
    assert str(folder) not in text and str(ROOT) not in text and not re.search(r'"/\w', text)


def test_the_progress_bar_ends_where_it_should(finished: tuple[PlainRun, list[str], Path]) -> None:
    """Catches a bar that stands at 60% when all is done: five peers started, the sixth never takes
    a turn."""
    _, ticks, _ = finished
    assert len(ticks) == turns(OPTIONS, peers=5)


def test_a_kill_keeps_what_was_measured_and_the_earlier_result(tmp_path: Path) -> None:
    """Catches a result that is saved at the end only, and one in progress that overwrites the
    committed one."""
    bench, _ = benchmark(tmp_path, replace(OPTIONS, rounds=50, prompt_tokens=(3,)))
    bench.out.write_text("the earlier result")
    taken = iter(range(8))  # a warm-up round and two and a half measured ones, of two turns each

    def tick(_: str) -> None:
        if next(taken) == 7:
            raise KeyboardInterrupt

    bench.tick = tick
    with pytest.raises(KeyboardInterrupt):
        bench.peers([Entry(write_peer(tmp_path, "transformers", GOOD))], letters)
    kept = read(PlainRun, bench.partial)
    assert len(kept.peers[0].full) == 2 and kept.peers[0].identical and not kept.complete
    assert bench.out.read_text() == "the earlier result"


def test_a_run_goes_on_where_its_minutes_ended(tmp_path: Path) -> None:
    """Catches rounds that are lost, measured twice or too many, a difference of the first sitting
    that is forgotten in the second, and a text that is read again."""
    changed = "return [ids[-1] + 1] * max_new_tokens if os.path.exists(self.told[0] + '/second')"
    honest = " else [ids[-1] + 1 + i for i in range(max_new_tokens)]"
    reads = "    def read(self, ids):\n        return 2.0 * (len(ids) - 1), ids[1:]\n"
    specs = [
        write_peer(tmp_path, "transformers", GOOD + reads),
        write_peer(tmp_path, "moody", "import os\n" + generating(changed + honest) + reads),
        write_peer(tmp_path, "deaf", GOOD),
    ]
    entries = [Entry(spec) for spec in specs]
    options = replace(OPTIONS, rounds=3, prompt_tokens=(3, 6))
    (tmp_path / "second").touch()  # it writes something else in the first sitting only
    bench, ticks = benchmark(tmp_path, options)
    bench.tick = lambda _: (ticks.append(""), setattr(bench, "_ends", 0.0))[0]
    with pytest.raises(Paused):
        bench.peers(entries, letters, letters("abcdef"))
    kept = read(PlainRun, bench.partial)
    assert [len(row.full) for row in kept.peers] == [1, 0] * 3 and not kept.readings
    (tmp_path / "second").unlink()
    again, _ = benchmark(tmp_path, options)
    again.run = continued(again.run, bench.partial, PlainRun.plan)
    for _ in range(2):  # the second time there is nothing left
        again.peers(entries, letters, letters("abcdef"))
    assert [len(row.full) for row in again.run.peers] == [3] * 6
    moody = [row for row in again.run.peers if row.peer == "moody"]
    assert [(row.identical, row.first_difference) for row in moody] == [(False, 1), (True, None)]
    found = {each.peer: (each.tokens, each.loss, each.same) for each in again.run.readings}
    assert found == {"transformers": (5, 10.0, 5), "moody": (5, 10.0, 5), "deaf": (0, 0.0, 0)}
    text = markdown(again.run)
    assert re.search(r"\| moody +\| +7\.389 \| +\+0\.00% \| +100\.0% \|", text)
    assert re.search(r"\| deaf +\| failed: KeyError", text)
    other, _ = benchmark(tmp_path, replace(options, new_tokens=5))
    with pytest.raises(OptionError, match="differs in new_tokens"):
        continued(other.run, bench.partial, PlainRun.plan)


def test_a_peer_takes_part_with_several_kinds_of_weights(tmp_path: Path) -> None:
    """Catches int8 measured in float32, one row for two kinds, the folder given to a peer that is
    to run the file, and a peer without such weights that runs in others."""
    kinds = GOOD.replace("threads):", "threads, weights='auto'):").replace(
        "self.told =", "self.precision = f'{weights} of {folder[-5:]}'; self.told ="
    )
    known = {
        "engine": write_peer(tmp_path, "engine", kinds),
        "other": write_peer(tmp_path, "other", GOOD),
    }
    names = ["engine", "engine:int8", "engine:stored", "other:int4", "engine:int8"]
    taking_part = entries(names, known)
    assert [each.name for each in taking_part] == names[:-1]
    run = new_run("tiny", OPTIONS, names[:-1])
    quiet = [tmp_path / "out.json", lambda _: None, lambda _: None]
    bench = PlainBenchmark(run, OPTIONS, tmp_path, *quiet, file=tmp_path / "model.gguf")  # type: ignore[arg-type]
    bench.peers(taking_part, letters)
    rows = {name: rows[0] for name, rows in rows_of(bench.run).items()}
    end = tmp_path.as_posix()[-5:]
    said = [f"auto of {end}", f"int8 of {end}", "stored of .gguf", ""]
    assert [rows[name].precision for name in names[:-1]] == said
    assert rows["other:int4"].failure == (
        "NotImplementedError: this peer's weights are of a dtype, not int4"
    )
    assert rows["engine:int8"].identical
    assert re.search(r"\| engine:stored +\|.* stored of \.gguf +\|", markdown(bench.run))
    with pytest.raises(OptionError, match="engine:int9: unknown weights 'int9': did you mean"):
        entries(["engine:int9"], known)
    with pytest.raises(OptionError, match="engine:stored runs a GGUF file"):
        source_of(taking_part[2], tmp_path, None)


def test_peers_are_ended_when_the_run_is(tmp_path: Path) -> None:
    """Catches processes with a model in memory that outlive the benchmark, also when it is
    interrupted."""
    spec = write_peer(
        tmp_path,
        "transformers",
        GOOD.replace(
            "self.told =",
            "import os; open(folder + '/pid', 'w').write(str(os.getpid())); self.told =",
        ),
    )
    bench, _ = benchmark(tmp_path)

    def tick(_: str) -> None:
        raise KeyboardInterrupt

    bench.tick = tick
    with pytest.raises(KeyboardInterrupt):
        bench.peers([Entry(spec)], letters)
    pid = (tmp_path / "pid").read_text()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("mine", "expected", "index"),
    [
        ([1, 2], [1, 2], None),
        ([1, 3], [1, 2], 1),
        ([1], [1, 2], 1),
        ([1, 2, 3], [1, 2], 2),
        ([], [], None),
    ],
)
def test_first_difference(mine: list[int], expected: list[int], index: int | None) -> None:
    """Catches a comparison that stops at the end of the shorter one."""
    assert first_difference(mine, expected) == index


def test_an_unsteady_reference_is_not_called_identical() -> None:
    """Catches comparing only the last version of what somebody wrote."""
    tokens, row = Tokens(), PeerRow("transformers", 3, 2)
    tokens.add("transformers", [1, 2])
    tokens.add("transformers", [1, 3])
    tokens.judge(row, "transformers")
    assert (row.identical, row.first_difference) == (False, 1)


@pytest.mark.parametrize("length", [1, 7, 30, 95])
def test_prompts_have_the_length_that_was_asked_for(length: int) -> None:
    """Catches a 512-token row that had fewer tokens because the text ran out (30 here): it starts
    over."""
    ids = prompt_ids(lambda text: list(range(30)), length)
    assert ids == [index % 30 for index in range(length)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"new_tokens": 1}, "new_tokens=1"),
        ({"rounds": 0}, "rounds=0"),
        ({"threads": 0}, "threads=0"),
        ({"time_limit": -1.0}, "time_limit"),
        ({"prompt_tokens": (64, 0)}, "prompt_tokens"),
        ({"verify_contexts": (0,)}, "verify_contexts"),
    ],
)
def test_what_cannot_be_measured_is_refused(change: dict[str, object], message: str) -> None:
    """Catches minutes of loading before a division by zero."""
    with pytest.raises(OptionError, match=message):
        replace(OPTIONS, **change).check()  # type: ignore[arg-type]
    quick(PlainOptions()).check()


def test_lengths_beyond_the_context_are_refused(tmp_path: Path) -> None:
    """Catches peers that cut the prompt, each in its own way."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 600}')
    check_context(tmp_path, replace(OPTIONS, verify_contexts=(64, 512), verify_tokens=(1, 16)))
    for options in (
        replace(OPTIONS, verify_contexts=(590,)),
        replace(OPTIONS, prompt_tokens=(599,), verify_contexts=(64,)),
    ):
        with pytest.raises(OptionError, match="this model has 600"):
            check_context(tmp_path, options)


def test_numbers_as_they_are_typed() -> None:
    """Catches a range that loses its end."""
    assert numbers("64,512", "--x") == (64, 512) and numbers("1-3,8", "--x") == (1, 2, 3, 8)
    with pytest.raises(OptionError, match="--prompts='64;512'"):
        numbers("64;512", "--prompts")


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    """Catches a hub name that reaches the peers, which would each fail in their own words."""
    assert folder_of(str(write_config(tmp_path))) == tmp_path
    with pytest.raises(OptionError, match="there is no folder"):
        folder_of(str(tmp_path / "none"))


def write_config(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    return folder


def test_errors_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches tracebacks for typing errors, and errors that end with success."""
    monkeypatch.setattr(sys, "argv", ["bench", "--peers", "selfspek"])
    with pytest.raises(SystemExit) as ended:
        run_command(plain)
    captured = capsys.readouterr()
    assert ended.value.code == 1
    assert (
        captured.err == "Error: Unknown peer 'selfspek': did you mean 'selfspec'?\n"
        and captured.out == ""
    )


def test_show_prints_the_tables_of_a_file(
    finished: tuple[PlainRun, list[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches tables that only a run can print: the committed ones are made again from their
    JSON."""
    run, _, folder = finished
    monkeypatch.setattr(sys, "argv", ["bench", "--show", str(folder / "out.json")])
    with pytest.raises(SystemExit) as ended:
        run_command(plain)
    assert not ended.value.code and capsys.readouterr().out.strip() == markdown(run).strip()


def test_the_command_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches parts that do not fit each other: our engine and transformers on a tiny model,
    through the real peers, the card and the verify curve, to the last line of JSON; and our greedy
    tokens must be transformers'."""
    from selfspec.testing import tiny_model, tiny_tokenizer

    model = tmp_path / "model"
    tiny_model("llama", max_position_embeddings=256).save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    options = "--rounds 1 --max-new-tokens 8 --prompts 16,40 --contexts 32,64 --verify 1,8"
    options += " --threads 1 --peers transformers,selfspec,selfspec:int8"
    monkeypatch.setattr(
        sys,
        "argv",
        ["bench", "--model", str(model), "--out", str(tmp_path / "out.json"), *options.split()],
    )
    with pytest.raises(SystemExit) as ended:
        run_command(plain)
    assert not ended.value.code
    summary = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert all(
        summary["identical"][f"{peer}@{length}"]
        for peer in ("transformers", "selfspec")
        for length in (16, 40)
    )
    assert (
        list(summary["verify8_over_decode1"]) == ["32", "64"]
        and summary["file"] == "out.json"
        and summary["complete"]
    )
    run = read(PlainRun, tmp_path / "out.json")
    sizes = [run.costs[name].weight_bytes for name in ("selfspec", "selfspec:int8")]
    assert sizes[0] > 2 * sizes[1] > 0 and run.model == "model"
    assert not list(tmp_path.glob("*.partial.json"))


def test_the_script_knows_its_benchmarks() -> None:
    """Catches a typing error that starts a benchmark of ten minutes, or the wrong one."""
    done = subprocess.run(
        [str(ROOT / "scripts" / "bench"), "plane"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "Unknown benchmark 'plane'; known: plain" in done.stderr


def test_our_peer_is_measured_through_the_same_door() -> None:
    """Catches a shortcut for ourselves: our row comes from a peer file; nothing in the harness
    knows its name."""
    spec = PeerSpec("selfspec", SHIPPED / "selfspec")
    assert (spec.folder / "peer.py").exists() and not spec.own_environment
    bench = ROOT / "src" / "selfspec" / "bench"
    files = [bench / f"{name}.py" for name in ("peers", "peer_host", "timing")]
    for file in (*files, ROOT / "benchmarks" / "plain" / "run.py"):
        assert '"selfspec"' not in file.read_text().replace('{"selfspec": __version__', "")

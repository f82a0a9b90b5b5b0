"""The peer protocol with made-up peers in real processes: what they do wrong becomes a reason."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from selfspec.bench.peers import Peer, PeerFailed, PeerSpec, choose, find_peers, last_line
from selfspec.errors import OptionError

GOOD = """
class Peer:
    packages = ("pytest",)
    def load(self, folder, dtype, threads):
        self.told = (folder, dtype, threads)
    def generate(self, ids, max_new_tokens, eos):
        return [ids[-1] + 1 + i for i in range(max_new_tokens)]
"""


def write_peer(folder: Path, name: str, source: str) -> PeerSpec:
    """A peer folder with this source; `BODY` lines replace what the good one does in `generate`."""
    (folder / name).mkdir(parents=True)
    (folder / name / "peer.py").write_text(textwrap.dedent(source))
    return PeerSpec(name, folder / name)


def generating(body: str) -> str:
    return GOOD.replace("return [ids[-1] + 1 + i for i in range(max_new_tokens)]", body)


Open = Callable[..., Peer]


def generated(
    peer: Peer, ids: list[int], count: int, eos: Sequence[int] = ()
) -> tuple[list[int], float]:
    """The tokens of one row and their seconds."""
    reply = peer.answer([ids], count, eos)
    return reply.rows[0], reply.seconds


@pytest.fixture
def open_peer(tmp_path: Path) -> Iterator[Open]:
    opened: list[Peer] = []

    def start(source: str, limit: float = 20.0, **options: object) -> Peer:
        peer = Peer(
            write_peer(tmp_path, f"peer{len(opened)}", source), threads=2, limit=limit, **options
        )  # type: ignore[arg-type]
        opened.append(peer)
        peer.load(tmp_path, "float32")
        return peer

    yield start
    for peer in opened:
        peer.close()


def test_ids_go_in_and_new_ids_come_out(open_peer: Open) -> None:
    """Catches a protocol that loses or reorders ids, and versions that are not passed on."""
    peer = open_peer(GOOD)
    assert generated(peer, [5, 7], 3)[0] == [8, 9, 10]
    assert generated(peer, [1], 1)[0] == [2], "a second request must not get the first one's answer"
    assert peer.versions == {"pytest": pytest.__version__}


def test_a_package_without_metadata_is_no_reason_to_fail(open_peer: Open) -> None:
    """Catches a peer that works from a source folder, as our own may, and is called broken for
    having no version."""
    assert open_peer(
        GOOD.replace('("pytest",)', '("package-that-is-not-there", "pytest")')
    ).versions == {"pytest": pytest.__version__}


def test_the_harness_takes_the_time(open_peer: Open) -> None:
    """Catches believing the peer's own clock: here the harness's clock is invented and must be read
    around each request."""
    ticks = iter([0.0, 100.0, 200.0, 203.5])
    peer = open_peer(GOOD, clock=lambda: next(ticks))
    assert generated(peer, [1], 2)[1] == 3.5, "the first two readings belong to the load"


def test_a_peer_is_told_folder_dtype_and_threads(open_peer: Open, tmp_path: Path) -> None:
    """Catches peers that run with settings of their own, in the arguments or in OpenMP's
    environment."""
    peer = open_peer(
        generating(
            "import os; assert (self.told, os.environ['OMP_NUM_THREADS'], eos) == ("
            + f"({str(tmp_path)!r}, 'float32', 2)"
            ", '2', [9]); return ids"
        )
    )
    assert generated(peer, [4, 9], 2, eos=[9])[0] == [4, 9]


def test_printing_libraries_cannot_answer_for_the_peer(open_peer: Open) -> None:
    """Catches a banner on stdout, from Python or from C, being taken for the reply."""
    body = (
        "import os; print('{\"tokens\": [666]}', flush=True); "
        "os.write(1, b'{\"tokens\": [666]}\\n'); return [1] * max_new_tokens"
    )
    assert generated(open_peer(generating(body)), [1], 2)[0] == [1, 1]


@pytest.mark.parametrize("made", [0, 2, 4])
def test_another_number_of_tokens_is_a_failure(open_peer: Open, made: int) -> None:
    """Catches the commonest unfair benchmark: time divided by tokens that were never made (or by
    fewer than were made)."""
    peer = open_peer(generating(f"return [1] * {made}"))
    with pytest.raises(PeerFailed, match=f"made {made} tokens where 3 were asked for"):
        generated(peer, [1], 3)
    if made == 2:
        assert generated(peer, [1], 3, eos=[1])[0] == [1, 1], "with an end token, fewer are right"
    else:
        with pytest.raises(PeerFailed, match=f"made {made} tokens where 3 or an end token"):
            generated(peer, [1], 3, eos=[1])


def test_a_peer_that_raises_says_why_and_can_be_asked_again(open_peer: Open) -> None:
    """Catches a lost reason, and a peer given up for one prompt that it could not take."""
    peer = open_peer(generating("return ids if len(ids) == 1 else ids['too long']"))
    with pytest.raises(PeerFailed, match="TypeError"):
        generated(peer, [1, 2], 2)
    assert generated(peer, [3], 1)[0] == [3]


def test_a_peer_that_dies_leaves_its_last_words(open_peer: Open) -> None:
    """Catches waiting out the time limit for a dead process, and a row that only says 'failed'."""
    peer = open_peer(
        generating(
            "import os, sys; print('out of memory', file=sys.stderr, flush=True); os._exit(3)"
        ),
        limit=120,
    )
    start = time.monotonic()
    for _ in range(2):  # asked again, it is as dead as before
        with pytest.raises(PeerFailed, match="ended with 3: out of memory"):
            generated(peer, [1], 1)
    assert time.monotonic() - start < 60, (
        "the end of the process must be noticed long before the limit of 120 s"
    )


def test_a_peer_that_hangs_is_ended(open_peer: Open) -> None:
    """Catches a benchmark that stands still for ever, and a hanging process that is left behind."""
    peer = open_peer(generating("import time; time.sleep(600)"), limit=20)
    peer._limit = 0.2  # the start of an interpreter needs longer than that
    for _ in range(2):
        with pytest.raises(PeerFailed, match=r"no answer within 0\.2 s"):
            generated(peer, [1], 1)
    assert peer._process.wait(timeout=20) != 0


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import package_that_is_not_there",
            "ModuleNotFoundError: No module named 'package_that_is_not_there'",
        ),
        ("x = (", "SyntaxError"),
        ("import os; os._exit(7)", "ended with 7"),
    ],
)
def test_a_peer_that_cannot_load_says_why(open_peer: Open, source: str, reason: str) -> None:
    """Catches an error of the harness itself where a peer is broken or its package is missing."""
    with pytest.raises(PeerFailed, match=reason):
        open_peer(source)


def test_no_paths_get_out_of_a_failure(open_peer: Open, tmp_path: Path) -> None:
    """Catches somebody's home folder in a published result."""
    peer = open_peer(
        generating("raise OSError('cannot map ' + self.told[0] + '/model.bin, sorry')")
    )
    with pytest.raises(PeerFailed, match="cannot map <path>/, sorry") as caught:
        generated(peer, [1], 1)
    assert str(tmp_path) not in str(caught.value)


def test_closing_ends_the_process(open_peer: Open) -> None:
    """Catches peers that keep their memory and their threads after the run."""
    peer = open_peer(GOOD)
    peer.close()
    peer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(peer._process.pid, 0)


def test_a_peer_with_an_install_script_has_an_interpreter_of_its_own(tmp_path: Path) -> None:
    """Catches a peer that runs, without its packages or with the wrong ones, in the project's
    environment."""
    spec = write_peer(tmp_path, "apart", GOOD)
    install = spec.folder / "install"
    install.write_text(
        '#!/bin/sh\necho "pulled" >> "$(dirname "$0")/log"\nmkdir -p "$(dirname "$0")/.venv/bin"\n'
        'ln -s "$SELFSPEC_PYTHON" "$(dirname "$0")/.venv/bin/python"\n'
    )
    install.chmod(0o755)
    assert spec.python == str(spec.folder / ".venv/bin/python")
    spec.install()
    spec.install()
    assert (spec.folder / "log").read_text() == "pulled\n", "installed once, not at every run"
    peer = Peer(spec, threads=1, limit=20)
    peer.close()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\necho no such wheel >&2\nexit 4\n", "4: no such wheel"),
        ("#!/nowhere\n", "install: "),
    ],
)
def test_a_failed_install_is_a_reason(tmp_path: Path, script: str, reason: str) -> None:
    """Catches a traceback of the whole benchmark because one peer's wheel is not to be had."""
    spec = write_peer(tmp_path, "apart", GOOD)
    (spec.folder / "install").write_text(script)
    (spec.folder / "install").chmod(0o755)
    with pytest.raises(PeerFailed, match=reason):
        spec.install()
    with pytest.raises(PeerFailed, match="could not be started"):
        Peer(spec, threads=1, limit=20)


def test_unknown_peers_name_the_nearest(tmp_path: Path) -> None:
    """Catches a peer that is silently left out because of a typing error."""
    for name in ("transformers", "selfspec"):
        write_peer(tmp_path, name, GOOD)
    known = find_peers(tmp_path)
    assert [spec.name for spec in choose(["selfspec", "transformers", "selfspec"], known)] == [
        "selfspec",
        "transformers",
    ]
    with pytest.raises(
        OptionError, match="Unknown peer 'transfromers': did you mean 'transformers'"
    ):
        choose(["transfromers"], known)


def test_a_wheel_has_ours_and_transformers(tmp_path: Path) -> None:
    """Catches a benchmark that cannot start from an installed wheel, which has no benchmarks
    folder."""
    assert list(find_peers(tmp_path)) == ["selfspec", "transformers"]


def test_a_reply_has_rows_and_the_moment_of_the_first_tokens(open_peer: Open) -> None:
    """Catches the first tokens' time taken for the answer's, a later one for the first, one left
    over from the last request."""
    ticks = iter([0.0, 1.0, 10.0, 12.0, 13.0, 17.0, 20.0, 21.0])
    body = "[self.first(n) for n in (2, 3)] if len(ids) == 2 else None; return [7] * max_new_tokens"
    peer = open_peer(generating(body), clock=lambda: next(ticks))
    reply = peer.answer([[5, 6]], 4, [], {})
    assert (reply.rows, reply.seconds, reply.first_seconds, reply.first_tokens) == (
        [[7] * 4],
        7.0,
        2.0,
        2,
    )
    assert peer.answer([[5]], 4, [], {}).first_seconds is None


def test_first_tokens_may_be_told_of_later(open_peer: Open) -> None:
    """The moment of telling taken for that of the tokens; seconds since then added to it."""
    ticks = iter([0.0, 1.0, 10.0, 20.0, 22.0])
    peer = open_peer(
        generating("self.first(3, 4.5); return [7] * max_new_tokens"), clock=lambda: next(ticks)
    )
    reply = peer.answer([[5]], 4, [], {})
    assert (reply.seconds, reply.first_seconds, reply.first_tokens) == (12.0, 5.5, 3)


def test_several_rows_are_for_peers_that_take_them(open_peer: Open) -> None:
    """Catches a batch answered with its first row, and a peer without batches that is asked for
    one."""
    batch = (
        GOOD
        + "    def generate_batch(self, rows, max_new_tokens, eos):\n"
        + "        return [[row[0]] * max_new_tokens for row in rows]\n"
    )
    assert open_peer(batch).answer([[4], [5, 5]], 2, [], {}).rows == [[4, 4], [5, 5]]
    with pytest.raises(PeerFailed, match="one prompt at a time"):
        open_peer(GOOD).answer([[4], [5]], 2, [], {})


@pytest.mark.parametrize("made", ["[1] * 3", "[1]", "[]"])
def test_an_answer_ends_at_its_limit_or_at_an_end_token(open_peer: Open, made: str) -> None:
    """Catches an engine that overshoots or stops early for no reason, and is credited with the
    time."""
    with pytest.raises(PeerFailed):
        open_peer(generating(f"return {made}")).answer([[4]], 2, [9], {})
    assert open_peer(generating("return [9]")).answer([[4]], 2, [9], {}).rows == [[9]]


def test_a_device_that_a_peer_cannot_be_told_is_a_failure(open_peer: Open, tmp_path: Path) -> None:
    """Catches a peer that runs on the CPU in a GPU's table."""
    peer = open_peer(GOOD)
    with pytest.raises(PeerFailed, match="on the CPU here, not on cuda"):
        peer.load(tmp_path, "float32", "cuda")
    told = open_peer(
        GOOD.replace("threads):", "threads, device='cpu'):").replace(
            "return [ids", "return [len(self.told[0])] + [ids"
        )
    )
    assert told.load(tmp_path, "float32", "cuda") > 0


def test_another_method_of_a_peer_can_be_called(open_peer: Open) -> None:
    """Catches arguments that are lost on the way, and a precision that is believed to be the
    dtype."""
    peer = open_peer(
        GOOD
        + "    precision = 'int8'\n    def more(self, a, b):\n        return [a, b, self.told[1]]\n"
    )
    assert peer.call("more", a=1, b="x") == [1, "x", "float32"] and peer.precision == "int8"
    assert peer.echo([1, 2, 3]) > 0
    with pytest.raises(PeerFailed, match="KeyError"):
        peer.call("nothing")


def test_last_line_is_the_one_that_says_something() -> None:
    """Catches an empty reason for a failure whose message ends in blank lines."""
    assert last_line("Traceback ...\n  here\nValueError: no\n\n  \n") == "ValueError: no"
    assert last_line("") == "no message"


def test_the_project_has_the_peers_it_promises() -> None:
    """Catches a peer that was moved or renamed: the default command would fail for everyone."""
    from benchmarks.plain.__main__ import PEERS

    specs = choose(PEERS.split(","), find_peers())
    assert [spec.name for spec in specs if spec.own_environment] == ["ctranslate2", "xllamacpp"]
    assert set(find_peers()) >= {"onnxruntime-genai", "openvino-genai", "economize", "flashspec"}
    specs = list(find_peers().values())
    assert all(
        os.access(spec.folder / "install", os.X_OK) for spec in specs if spec.own_environment
    )

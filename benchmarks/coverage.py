"""Which causal models of the installed transformers run here, and how.

For each type a tiny random model (shrunken.py) is loaded and asked to write, plainly and with
drafts, and its tokens are compared with those of transformers' `generate`. Each has a process of
its own. The result is benchmarks/results/coverage.json, of which docs/models.md shows a summary,
and beside it what is different with the oldest transformers that we allow (`--oldest`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing as mp
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RESULT, OLDEST = RESULTS / "coverage.json", RESULTS / "coverage-oldest.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- coverage: made by scripts/coverage -->", "<!-- end of coverage -->"
PATHS = {
    "native": "by our own forward",
    "modules": "layer by layer, by transformers' own modules",
    "floor": "as a whole, by transformers' own forward",
    "refused": "refused",
    "unknown": "not tried",
}
PROMPTS = (40, 9)
NEW = 24
SECONDS = 120  # for one type


@dataclass(frozen=True)
class Covered:
    """How one type runs."""

    type: str
    path: str
    exact: bool = False
    """Whether plain and drafted tokens are those of `generate`."""
    reason: str = ""
    """Why it is not run, not run by layers, or in what it differs."""
    raw: bool = False
    """Whether an exception that is none of selfspec's came out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("types", nargs="*", help="model types; all if none is named")
    more = "only the types that the file does not have yet: goes on with a run that was cut off"
    parser.add_argument("--missing", action="store_true", help=more)
    old = "in an environment with the oldest transformers that we allow"
    parser.add_argument("--oldest", action="store_true", help=old)
    asked = parser.parse_args()
    names, path = asked.types, OLDEST if asked.oldest else RESULT
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    _import_all()
    if asked.missing and path.exists():
        known = {each["type"] for each in stored(path)["types"]}
        names = [kind for kind in names or types() if kind not in known]
    elif not names and path.exists():
        path.unlink()
    for kind in names if asked.missing else names or types():
        each = asdict(covered(kind))
        print(f"{kind}: {each['path']}{', exact' * each['exact']} {each['reason']}", flush=True)
        _write(each, path)
    if RESULT.exists() and OLDEST.exists():
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_table(page, stored(), stored(OLDEST)), encoding="utf-8")
    print(json.dumps(stored(path)["counts"]))


def _import_all() -> None:
    """What every process needs, before they part."""
    importlib.import_module("selfspec.llm")
    for name in ("load.loading", "floor", "from_transformers"):
        importlib.import_module(f"selfspec.model.{name}")


def _write(row: Mapping[str, Any], path: Path) -> None:
    """Put a row into the file."""
    known = {each["type"]: each for each in stored(path)["types"]} if path.exists() else {}
    known[row["type"]] = row
    result = as_result(sorted(known.values(), key=lambda each: str(each["type"])))
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def stored(path: Path = RESULT) -> dict[str, Any]:
    """The result of the last run."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def types() -> list[str]:
    """Every type that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def covered(kind: str) -> Covered:
    """How a type runs, found out by a process of its own."""
    context = mp.get_context("fork")  # torch and transformers are imported once
    ours, theirs = context.Pipe()
    process = context.Process(target=_try_into, args=(kind, theirs))
    process.start()
    theirs.close()
    try:
        # second by second, so that time in which all of this stands still does not count
        if not any(ours.poll(1) for _ in range(SECONDS)):
            return Covered(kind, "unknown", reason=f"took longer than {SECONDS} s")
        found: Covered = ours.recv()
        return found
    except EOFError:
        return Covered(kind, "unknown", reason="its process ended", raw=True)
    finally:
        process.kill()
        process.join()


def _try_into(kind: str, pipe: Any) -> None:
    pipe.send(tried(kind))


def tried(kind: str) -> Covered:
    """How a type runs here."""
    from benchmarks.shrunken import tiny
    from selfspec import LLM
    from selfspec.errors import SelfspecError
    from selfspec.model.load.loading import refuse_assistant

    warnings.simplefilter("ignore")
    try:
        refuse_assistant(kind, "this model")
        model = tiny(kind)
    except SelfspecError as error:
        return Covered(kind, "refused", reason=_words(error))
    except Exception as error:  # noqa: BLE001  (any model's own code)
        return Covered(kind, "unknown", reason=f"no tiny model: {_words(error)}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            llm = LLM.from_pretrained(model)
        except SelfspecError as error:
            return Covered(kind, "refused", reason=_words(error))
        except Exception as error:  # noqa: BLE001
            return Covered(kind, "refused", reason=_words(error), raw=True)
    path = llm.info.kernel if llm.info.kernel in ("modules", "floor") else "native"
    why = "" if path == "native" else _because([str(each.message) for each in said], llm)
    try:
        wrong = differences(model, llm)
    except SelfspecError as error:
        return Covered(kind, path, reason=_words(error))
    except Exception as error:  # noqa: BLE001
        return Covered(kind, path, reason=_words(error), raw=True)
    return Covered(kind, path, not wrong, wrong or why)


def differences(model: Any, llm: Any) -> str:
    """Where our greedy tokens are not those of `generate`; "" if they are everywhere."""
    import torch

    generator = torch.Generator().manual_seed(0)
    drafters = [None, "hybrid", "auto", *([] if llm.model.whole else ["early-exit"])]
    for size in PROMPTS:
        ids = torch.randint(3, min(llm.info.vocabulary, 259), (1, size), generator=generator)
        try:
            expected = generated(model, ids)
        except Exception as error:  # noqa: BLE001  (any model's own code)
            return f"transformers' own generate raises {type(error).__name__}: {_words(error)}"
        for draft in drafters:
            ours = llm.generate(ids[0].tolist(), max_new_tokens=NEW, eos=[], draft=draft).tokens
            if ours == expected:
                continue
            pairs = enumerate(zip(ours, expected, strict=True))
            at = next(place for place, (one, other) in pairs if one != other)
            where = f"draft={draft} differs from generate at token {at} after {size}"
            if ours == by_whole_texts(model, ids):
                where += ", which differs there from the model's own forward over the whole text"
                if expected == by_whole_texts(model, ids, from_zero=True):
                    where += ": it counts positions from 0, and the forward from another number"
            elif expected != generated(model, ids, use_cache=False):
                where += ", which writes another text without its cache"
            return where
    return ""


def generated(model: Any, ids: Any, use_cache: bool = True) -> list[int]:
    """What transformers writes."""
    import torch

    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if not use_cache:
        options["use_cache"] = False
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def by_whole_texts(model: Any, ids: Any, from_zero: bool = False) -> list[int]:
    """What the model's forward writes that reads the whole text for every token, without a cache
    and with positions of its own, or those that count from zero."""
    import torch

    text = ids
    with torch.inference_mode():
        for _ in range(NEW):
            own = {"position_ids": torch.arange(text.shape[1])[None]} if from_zero else {}
            logits = model(input_ids=text, use_cache=False, **own).logits
            text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
    tokens: list[int] = text[0, ids.shape[1] :].tolist()
    return tokens


def _because(said: Sequence[str], llm: Any) -> str:
    """What the warning at load says of the reason."""
    found = [re.search(r"because (.*)\. Drafts come", each, re.DOTALL) for each in said]
    reasons = [match[1] for match in found if match]
    how = [each.split("whole model, and ")[-1].rstrip(")") for each in llm.info.alone]
    return "; ".join([*reasons, *(how if llm.model.whole else [])])


def _words(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)) or type(error).__name__
    return text[:300]


def as_result(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the file of results holds."""
    import torch
    import transformers

    return {
        "command": "scripts/coverage",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "counts": counts(found),
        "types": list(found),
    }


def counts(found: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many types run on each path, and how many are exact."""
    numbers = {path: sum(each["path"] == path for each in found) for path in PATHS}
    return {**numbers, "exact": sum(each["exact"] for each in found), "types": len(found)}


def table(result: Mapping[str, Any]) -> str:
    """The summary that docs/models.md shows."""
    found, number = result["types"], result["counts"]
    lines = [
        f"Of the causal types of transformers {result['transformers']}, {number['types']} were "
        f"tried. {number['exact']} write the tokens of `generate` here.",
        "",
        "| path | types | which |",
        "|---|---|---|",
    ]
    for path, words in PATHS.items():
        here = [each for each in found if each["path"] == path and path in _RUN]
        if here:
            names = ", ".join(f"`{each['type']}`" + "*" * (not each["exact"]) for each in here)
            lines.append(f"| `{path}`: {words} | {len(here)} | {names} |")
    rest = [each for each in found if each["path"] not in _RUN or not each["exact"]]
    if rest:
        lines += ["", "The others (*: runs, and is not exact):", "", "| type | why |", "|---|---|"]
        lines += [f"| `{each['type']}` | {_cell(each['reason'])} |" for each in rest]
    return "\n".join(lines)


def of_oldest(result: Mapping[str, Any], newest: Mapping[str, Any]) -> str:
    """What the page says of the oldest version: what runs another way there."""
    number, now = result["counts"], {each["type"]: each for each in newest["types"]}
    ways = ", ".join(f"{number[path]} `{path}`" for path in _RUN)
    lines = [
        f"With transformers {result['transformers']}, the oldest version that we allow, "
        f"{number['exact']} of {number['types']} types write the tokens of `generate`: {ways}. "
        "What is different there:",
        "",
        "| type | path | why |",
        "|---|---|---|",
    ]
    for each in result["types"]:
        like = now.get(each["type"])
        if like is None or (each["path"], each["exact"]) != (like["path"], like["exact"]):
            path = f"{each['path']}, {'exact' if each['exact'] else 'not exact'}"
            lines.append(f"| `{each['type']}` | {path} | {_cell(each['reason'])} |")
    return "\n".join(lines)


_RUN = ("native", "modules", "floor")


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")")


def with_table(page: str, result: Mapping[str, Any], oldest: Mapping[str, Any]) -> str:
    """The page with the summary in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(result)}\n\n{of_oldest(oldest, result)}\n{END}{after}"


if __name__ == "__main__":
    main()

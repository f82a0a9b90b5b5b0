"""LayerSkip's Tables 1, 2, 4 to 6 and 10: figures of "LayerSkip: Enabling Early Exit Inference and
Self-Speculative Decoding", 2024."""

from __future__ import annotations

from benchmarks.paper.table import EXITS, LOSSY, OWN, PLAIN, PaperRow, PaperTable

PAPER = "LayerSkip"
DRAFT = "early-exit:layer={exit}"
RECIPE = (
    "Their drafting model was trained with the recipe, and their speedup is over plain decoding "
    "of the same model trained "
    "without it; ours is over plain decoding of the very model that drafts. A model without the "
    "recipe accepts little."
)
MACHINE = (
    "Their Llama2 of 7 and 13 billion parameters on an H100; yours may be any model on any "
    "machine: compare ratios."
)
TOPV2 = "TOPv2 is not shipped: give it as --task jsonl=FILE with prompt and answer."
DEPTH = "Exit layers are at the paper's share of the depth."
PIECES = ("ROUGE-2", "accepted", "tokens/s", "speedup")


def _two(
    row: PaperRow, *figures: tuple[str, tuple[str, ...]], names: tuple[str, ...] = PIECES
) -> PaperRow:
    """The row with figures of several models, in the order of `names`."""
    found = {
        f"{model} {name}": value
        for model, values in figures
        for name, value in zip(names, values, strict=True)
        if value
    }
    return PaperRow(row.task, row.name, row.method, found, row.exit, row.why)


def _row(
    task: str, name: str, method: str | None, exit: float | None = None, why: str = ""
) -> PaperRow:
    return PaperRow(task, name, method, {}, exit, why)


NO_SEARCH = "the search that chose its halves is not run here; see dv-table1"
TABLE2 = (
    _two(
        _row("cnn-dm", "autoregressive", PLAIN),
        ("7B", ("0.079", "", "62.7", "1.00x")),
        ("13B", ("0.098", "", "37.2", "1.00x")),
    ),
    _two(
        _row("cnn-dm", "early exit", LOSSY, 8 / 32),
        ("7B", ("0.012", "", "232.4", "")),
        ("13B", ("0.016", "", "105.5", "")),
    ),
    _two(
        _row("cnn-dm", "self-speculative, d=12", "{draft}@fixed:tokens=12", 8 / 32),
        ("7B", ("0.078", "68.9%", "127.9", "1.86x")),
        ("13B", ("0.098", "74.5%", "70.2", "1.81x")),
    ),
    _two(
        _row("cnn-dm", "Draft & Verify", None, why=NO_SEARCH), ("13B", ("0.107", "", "", "1.56x"))
    ),
    _two(
        _row("xsum", "autoregressive", PLAIN),
        ("7B", ("0.073", "", "63.4", "1.00x")),
        ("13B", ("0.124", "", "43.8", "1.00x")),
    ),
    _two(
        _row("xsum", "early exit", LOSSY, 8 / 32),
        ("7B", ("0.002", "", "228.0", "")),
        ("13B", ("0.009", "", "110.6", "")),
    ),
    _two(
        _row("xsum", "self-speculative, d=12 (13B: 4)", "{draft}@fixed:tokens=12", 8 / 32),
        ("7B", ("0.073", "54.6%", "104.7", "1.54x")),
        ("13B", ("0.124", "67.7%", "60.5", "1.34x")),
    ),
    _two(_row("xsum", "Draft & Verify", None, why=NO_SEARCH), ("13B", ("0.126", "", "", "1.48x"))),
    _two(
        _row("humaneval", "autoregressive", PLAIN),
        ("7B", ("0.041", "", "62.9", "1.00x")),
        ("13B", ("0.055", "", "48.9", "1.00x")),
    ),
    _two(
        _row("humaneval", "early exit", LOSSY, 8 / 32),
        ("7B", ("0.003", "", "225.4", "")),
        ("13B", ("0.0005", "", "244.3", "")),
    ),
    _two(
        _row(
            "humaneval", "self-speculative, d=6 (13B: E=7, d=4)", "{draft}@fixed:tokens=6", 8 / 32
        ),
        ("7B", ("0.042", "67.1%", "122.8", "1.83x")),
        ("13B", ("0.055", "57.0%", "84.2", "1.66x")),
    ),
)
TABLE4 = (
    _two(_row("humaneval", "autoregressive", PLAIN), ("7B", ("0.0513", "", "34", "1.0x"))),
    _two(_row("humaneval", "early exit", LOSSY, 6 / 32), ("7B", ("0.0035", "", "170", ""))),
    _two(
        _row("humaneval", "self-speculative", "{draft}@fixed:tokens=12", 6 / 32),
        ("7B", ("0.0513", "45%", "62", "1.82x")),
    ),
)
TIMES = ("exact match", "accepted", "ms/token", "speedup")


def _top(name: str, method: str, exit: float | None, *values: str) -> PaperRow:
    return _two(_row(OWN, name, method, exit), ("1.5B", values), names=TIMES[: len(values)])


TABLE5 = (
    _top("autoregressive", PLAIN, None, "85.9%", "", "36", "1.00x"),
    *(
        _top(f"early exit, E={layer} of 24", LOSSY, layer / 24, match, "", time, "")
        for layer, match, time in ((18, "83.3%", "28"), (12, "79.4%", "19"), (6, "62.9%", "10"))
    ),
    *(
        _top(
            f"self-speculative, E={layer} of 24",
            "{draft}@fixed:tokens=8",
            layer / 24,
            "82.9%",
            kept,
            time,
            speed,
        )
        for layer, kept, time, speed in (
            (18, "98.9%", "29", "1.24x"),
            (12, "97.6%", "22", "1.64x"),
            (6, "76.0%", "18", "2.0x"),
        )
    ),
)
TABLE10 = (
    _top("autoregressive", PLAIN, None, "85.39%", "", "165"),
    *(
        _top(f"early exit, E={layer} of 24", LOSSY, layer / 24, match, "", time)
        for layer, match, time in ((18, "82.0%", "124"), (12, "77.2%", "84"), (6, "29.8%", "44"))
    ),
    *(
        _top(
            f"self-speculative, E={layer} of 24",
            "{draft}@fixed:tokens=7",
            layer / 24,
            "82.9%",
            kept,
            time,
        )
        for layer, kept, time in ((18, "99%", "134"), (12, "97%", "104"), (6, "76%", "87"))
    ),
)


def _reuse(task: str, label: str, values: tuple[tuple[int, str, str], ...]) -> tuple[PaperRow, ...]:
    return tuple(
        PaperRow(
            task, f"{label}, E={layer} of 24, {words}", method, {"1.5B ms/token": time}, layer / 24
        )
        for layer, reused, again in values
        for words, method, time in (
            ("reuse", "{draft}@fixed:tokens=7", reused),
            ("no reuse", "early-exit:layer={exit},reuse=false@fixed:tokens=7", again),
        )
    )


TABLE6 = (
    *_reuse(OWN, "TOPv2", ((18, "134", "143"), (12, "104", "110"))),
    *_reuse("cnn-dm", "CNN/DM", ((18, "166", "182"), (12, "165", "185"))),
)
# Last and middle layer: Llama2 7B without and with the recipe, then 13B.
_EXITS = {
    "perplexity": (
        ("Wikipedia", "4.32", "4.3", "1900", "8.12", "3.97", "3.98", "507", "10.5"),
        ("Selected Books", "1.60", "1.06", "4390", "6.53", "1.40", "1.40", "1170", "11.9"),
        ("The Stack", "2.15", "2.14", "968", "2.99", "2.05", "2.06", "65.8", "3.71"),
    ),
    "accuracy of choices, %": (
        ("BoolQ", "77.4", "77.8", "62.2", "75.7", "81.6", "82.0", "62.2", "69.7"),
        ("PIQA", "78.0", "77.9", "57.9", "69.5", "79.3", "78.5", "62.8", "67.8"),
        ("SIQA", "44.7", "44.2", "37.8", "42.0", "46.7", "46.3", "40.7", "44.7"),
        ("HellaSwag", "57.0", "56.6", "31.5", "43.8", "60.1", "60.3", "35.6", "46.8"),
        ("WinoGrande", "69.8", "71.4", "58.6", "65.2", "72.3", "72.5", "59.4", "68.1"),
        ("ARC-e", "76.5", "76.5", "38.6", "57.5", "79.4", "79.2", "48.8", "61.1"),
        ("ARC-c", "43.8", "43.6", "26.8", "30.6", "48.3", "47.3", "31.9", "35.6"),
        ("OBQA", "33.4", "33.4", "19.6", "25.4", "34.4", "35.4", "23.8", "25.4"),
        ("COPA", "90", "88", "68", "79", "91", "93", "73", "82"),
        ("RACE Middle", "58.2", "57.4", "34.0", "51.1", "62.0", "60.7", "40.9", "55.1"),
        ("RACE High", "42.9", "42.2", "28.0", "37.6", "44.9", "44.5", "31.8", "39.3"),
        ("MMLU", "46.0", "43.1", "38.9", "40.2", "55.2", "53.7", "49.2", "52.9"),
    ),
    "open answers, %": (
        ("NaturalQuestions", "25.1", "23.2", "0.0554", "4.07", "31.5", "31.8", "0.609", "4.43"),
        ("TriviaQA", "58.5", "56.8", "0.619", "11.8", "66.2", "66.3", "4.36", "11.4"),
        ("GSM8K", "14.3", "12.2", "0", "2.05", "29.3", "27.4", "0.0758", "1.74"),
        ("MATH", "3.22", "3.16", "0", "0.96", "5.06", "5.16", "0", "0.46"),
        ("HumanEval", "13.4", "15.9", "0", "4.88", "18.9", "18.3", "0", "3.05"),
        ("MBPP", "21.0", "22.4", "0", "7.20", "26.4", "29.0", "0", "3.40"),
    ),
}
_COLUMNS = [
    f"{size} {exit}{kind}"
    for size in ("7B", "13B")
    for exit in ("last", "middle")
    for kind in ("", ", recipe")
]
_MEASURED = {
    "GSM8K": "gsm8k",
    "HumanEval": "humaneval",
    "MBPP": "mbpp",
}  # the rest comes from the user's files, or not at all
TABLE1 = tuple(
    PaperRow(
        {"perplexity": "text", "accuracy of choices, %": "choices"}.get(
            group, _MEASURED.get(name, "-")
        ),
        name,
        None if group == "open answers, %" and name not in _MEASURED else PLAIN,
        dict(zip(_COLUMNS, values, strict=True)),
        why="no task of this name here",
    )
    for group, rows in _EXITS.items()
    for name, *values in rows
)

LAYERSKIP = (
    PaperTable(
        "layerskip-table1",
        PAPER,
        "What the last and the middle exit are worth",
        TABLE1,
        ("last", "middle"),
        EXITS,
        apart=(
            "Perplexities of different tokenizers and texts cannot be compared; the ratio of "
            "middle to last can.",
            "Shots and prompts of the multiple-choice tasks are not stated; yours are as your "
            "file has them.",
        ),
    ),
    PaperTable(
        "layerskip-table2",
        PAPER,
        "Self-speculation after continual pre-training",
        TABLE2,
        ("rouge2", "accepted", "tokens/s", "speedup"),
        draft=DRAFT,
        apart=(
            RECIPE,
            MACHINE,
            DEPTH,
            "ROUGE-2 of HumanEval is taken against the reference solution.",
        ),
    ),
    PaperTable(
        "layerskip-table4",
        PAPER,
        "Self-speculation after fine-tuning on code",
        TABLE4,
        ("rouge2", "accepted", "tokens/s", "speedup"),
        draft=DRAFT,
        apart=(RECIPE, DEPTH, "Their machine is an A100."),
    ),
    PaperTable(
        "layerskip-table5",
        PAPER,
        "Self-speculation on TOPv2",
        TABLE5,
        ("exact match", "accepted", "ms/token", "speedup"),
        draft=DRAFT,
        new_tokens=80,
        apart=(RECIPE, DEPTH, TOPV2),
    ),
    PaperTable(
        "layerskip-table6",
        PAPER,
        "What exit-state reuse saves, on a CPU",
        TABLE6,
        ("ms/token",),
        draft=DRAFT,
        new_tokens=50,
        missing="Drafts and tokens are taken from Table 10, whose set-up this repeats.",
        apart=(
            DEPTH,
            "TOPv2 is not shipped: give it as --task jsonl=FILE.",
            "Reuse saves most where verifying is dear.",
        ),
    ),
    PaperTable(
        "layerskip-table10",
        PAPER,
        "TOPv2 on a CPU",
        TABLE10,
        ("exact match", "accepted", "ms/token", "speedup"),
        draft=DRAFT,
        new_tokens=50,
        apart=(RECIPE, DEPTH, TOPV2),
    ),
)

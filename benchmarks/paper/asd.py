"""ASD's Tables 1 and 3 to 5: figures of "Draft on the Fly: Adaptive Self-Speculative Decoding using
Cosine Similarity", 2024."""

from __future__ import annotations

from benchmarks.paper.table import COSINES, PLAIN, PaperRow, PaperTable

PAPER = "ASD"
DRAFT = "cosine"
CONTROL = "@adaptive:tokens=12,target=0.9"
SEARCH = (
    "Their Draft & Verify rows need that paper's search; ours stand in with layer-skip's default "
    "halves."
)
MACHINE = "Their Llama-2-13B on two V100; yours may be any model on any machine: compare ratios."
SPEEDS = ("accepted", "tokens/s", "speedup")


def _pair(task: str, theirs: dict[str, tuple[str, str]], asd: str = DRAFT) -> tuple[PaperRow, ...]:
    """Plain decoding, Draft & Verify and ASD on one task; figures by model."""
    return (
        PaperRow(task, "autoregressive", PLAIN),
        PaperRow(
            task,
            "D&V",
            f"layer-skip{CONTROL}",
            {f"{model} speedup": values[0] for model, values in theirs.items()},
        ),
        PaperRow(
            task,
            "ASD",
            asd + CONTROL,
            {f"{model} speedup": values[1] for model, values in theirs.items()},
        ),
    )


TABLE1 = (
    PaperRow("text", "minimum ACS", PLAIN, {"13B attention": "0.581", "13B MLP": "0.854"}),
    PaperRow("text", "maximum ACS", PLAIN, {"13B attention": "0.998", "13B MLP": "0.991"}),
    PaperRow("text", "mean ACS", PLAIN, {"13B attention": "0.953", "13B MLP": "0.942"}),
    PaperRow("text", "median ACS", PLAIN, {"13B attention": "0.977", "13B MLP": "0.960"}),
    PaperRow("text", "mean time, ms", PLAIN, {"13B attention": "1.339", "13B MLP": "0.768"}),
)
TABLE3 = {
    "": {
        "cnn-dm": {"13B": ("1.495x", "1.443x"), "13B-chat": ("1.238x", "1.247x")},
        "xsum": {"13B": ("1.415x", "1.383x"), "13B-chat": ("1.143x", "1.110x")},
    },
    "-sampling": {
        "cnn-dm": {"13B": ("1.479x", "1.422x"), "13B-chat": ("1.219x", "1.238x")},
        "xsum": {"13B": ("1.383x", "1.350x"), "13B-chat": ("1.134x", "1.102x")},
    },
}
CODE = "cosine:every=4,keep_last=3"
TABLE5 = tuple(
    PaperRow("cnn-dm", name, f"cosine:{options}{CONTROL}", {"13B speedup": figure})
    for name, options, figure in (
        ("CS thresholding", "every=0,keep_last=0", "1.307x"),
        ("CS thresholding and rule 2", "every=0,keep_last=2", "1.340x"),
        ("rules 1 and 2", "threshold=2,every=3,keep_last=2", "1.179x"),
        ("all", "threshold=0.985,every=3,keep_last=2", "1.443x"),
    )
)
COMMON = (SEARCH, MACHINE, "Their tuned alpha differs by task; here 0.9.")

ASD = (
    PaperTable(
        "asd-table1",
        PAPER,
        "How little a half changes, and what it costs",
        TABLE1,
        ("attention", "MLP"),
        COSINES,
        apart=(
            "Theirs are means over 1000 articles of CNN/DM; ours over the text you give.",
            MACHINE,
        ),
    ),
    PaperTable(
        "asd-table3",
        PAPER,
        "Summaries, greedy",
        tuple(row for task, figures in TABLE3[""].items() for row in _pair(task, figures)),
        SPEEDS,
        draft=DRAFT,
        apart=COMMON,
    ),
    PaperTable(
        "asd-table3-sampling",
        PAPER,
        "Summaries at temperature 0.2, top-p 0.85",
        tuple(row for task, figures in TABLE3["-sampling"].items() for row in _pair(task, figures)),
        SPEEDS,
        draft=DRAFT,
        temperature=0.2,
        top_p=0.85,
        apart=COMMON,
    ),
    PaperTable(
        "asd-table4",
        PAPER,
        "HumanEval, greedy",
        _pair("humaneval", {"CodeLlama-13B": ("1.282x", "1.365x")}, CODE),
        SPEEDS,
        draft=DRAFT,
        apart=COMMON,
    ),
    PaperTable(
        "asd-table4-sampling",
        PAPER,
        "HumanEval at temperature 0.6, top-p 0.95",
        _pair("humaneval", {"CodeLlama-13B": ("1.282x", "1.340x")}, CODE),
        SPEEDS,
        draft=DRAFT,
        temperature=0.6,
        top_p=0.95,
        apart=COMMON,
    ),
    PaperTable(
        "asd-table5", PAPER, "Which rules it takes", TABLE5, SPEEDS, draft=DRAFT, apart=(MACHINE,)
    ),
)

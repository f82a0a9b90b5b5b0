"""SpecEE's Table 4 and Figures 15 and 17: figures of "SpecEE: Accelerating Large Language Model
Inference with Speculative Early Exiting", ISCA 2025. Its Figures 5 to 8, 10, 11 and 18 are made by
`scripts/bench exit_figures`, Figure 19 by `scripts/bench exits`."""

from __future__ import annotations

from benchmarks.paper.table import LEAVING, OWN, PLAIN, PaperRow, PaperTable

PAPER = "SpecEE"
SPECEE, ADAINFER, TREES = "lossy-specee", "lossy-adainfer", "lossy-specee-trees"
MODELS = "Their Llama-2-7B on a card; yours may be any model on any machine: compare differences."
HEAD = "Theirs has EAGLE's head name candidates; ours those that the predictors were fitted with."
CHOICES = (
    "Questions with choices are asked without examples (theirs with a few), and answered by a "
    "sentence with a letter: an answer's first token comes from the prompt's pass, in which "
    "nothing leaves."
)

TABLE4 = tuple(
    PaperRow(task, name, method, figures)
    for task, all_figures in {
        "gsm8k": {
            "Dense": {"7B accuracy": "20.62", "7B layers": "32"},
            "AdaInfer": {"7B accuracy": "0.00"},
            "SpecEE": {"7B accuracy": "20.00", "7B layers": "23.13"},
        },
        "mmlu": {
            "Dense": {"7B accuracy": "45.30", "7B layers": "32"},
            "AdaInfer": {"7B accuracy": "43.73", "7B layers": "28.91"},
            "SpecEE": {"7B accuracy": "44.64", "7B layers": "23.16"},
        },
        "commonsense-qa": {
            "Dense": {"7B accuracy": "61.43", "7B layers": "32"},
            "AdaInfer": {"7B accuracy": "53.00", "7B layers": "27.90"},
            "SpecEE": {"7B accuracy": "61.26", "7B layers": "22.90"},
        },
        "sst2": {
            "Dense": {"7B accuracy": "86.24", "7B layers": "32"},
            "AdaInfer": {},
            "SpecEE": {"7B accuracy": "85.89", "7B layers": "23.55"},
        },
        OWN: {
            "Dense": {"7B MT-Bench PPL": "6.49", "7B layers": "32"},
            "AdaInfer": {},
            "SpecEE": {"7B MT-Bench PPL": "8.44", "7B layers": "23.22"},
        },
    }.items()
    for (name, figures), method in zip(all_figures.items(), (PLAIN, ADAINFER, SPECEE), strict=True)
)
FIGURE15 = (
    PaperRow(OWN, "plain", PLAIN),
    PaperRow(OWN, "trees", "trees", {"speedup over trees": "1"}),
    PaperRow(OWN, "trees and exits", TREES, {"speedup over trees": "1.05"}),
)
FIGURE17 = tuple(
    PaperRow("-", f"{name}, {count} tokens", method, figures, tokens=count)
    for count in (1, 512, 2048)
    for name, method, figures in (
        ("dense", PLAIN, {}),
        ("SpecEE", SPECEE, {"7B more": "+0.9 GB", "13B more": "+1.4 GB"}),
    )
)

TABLES = (
    PaperTable(
        "specee-table4",
        PAPER,
        "What exits that nobody verifies cost in accuracy (LOSSY)",
        TABLE4,
        ("accuracy", "exact match", "layers", "agreement", "perplexity"),
        LEAVING,
        apart=(MODELS, HEAD, CHOICES),
    ),
    PaperTable(
        "specee-figure15",
        PAPER,
        "Exits inside trees of guesses (LOSSY)",
        FIGURE15,
        ("layers", "kept a pass", "agreement", "tokens/s"),
        LEAVING,
        apart=(MODELS, "Their trees are EAGLE's; ours are guessed from the text by `recycle`."),
    ),
    PaperTable(
        "specee-figure17",
        PAPER,
        "Memory by tokens",
        FIGURE17,
        ("memory, MB",),
        LEAVING,
        apart=(MODELS, "Theirs holds EAGLE's head; ours are weights, predictors and cache."),
    ),
)

"""Draft & Verify's Tables 1 to 5, 7, 9 to 13 and 15: figures from "Draft & Verify: Lossless Large
Language Model Acceleration via Self-Speculative Decoding" (2024). The tables' bodies are not in the
text these were taken from; what its prose says of them is.
"""

from __future__ import annotations

from benchmarks.paper.table import COPIES, PLAIN, SUMMARIES, TRAINED, PaperRow, PaperTable

PAPER = "Draft & Verify"
DRAFT = "layer-skip"
BODY = (
    "The table's body is not in the text that these figures were taken from: only what its prose "
    "repeats stands here."
)
SEARCH = (
    "Their skipped halves come from 1000 steps of Bayesian search. Ours are spread evenly "
    "(layer-skip's default), unless "
    "--methods 'layer-skip:profile=FILE' names halves that were found for this model."
)
DRAWN = (
    "Drafts are chosen outright, which keeps each seed's text. Their Algorithm 4 draws them: "
    "--methods 'layer-skip:sample=true@adaptive:tokens=12', whose texts are other ones than plain "
    "decoding's, of the same distribution."
)
MACHINE = "Their LLaMA-2-13B on an A100; yours may be any model on any machine: compare ratios."
ADAPTIVE = "{draft}@adaptive:tokens=12,target=0.9"
BOTH = ("cnn-dm", "xsum")


def _main(figures: dict[str, str], target: float) -> tuple[PaperRow, ...]:
    """Plain and self-speculative rows of both summary tasks."""
    targets = {"cnn-dm": 0.9, "xsum": target}
    return tuple(
        row
        for task in BOTH
        for row in (
            PaperRow(task, "autoregressive", PLAIN, {"13B speedup": "1.000x"}),
            PaperRow(
                task,
                "self-speculative",
                f"{{draft}}@adaptive:tokens=12,target={targets[task]}",
                {"13B speedup": figures[task]} if task in figures else {},
            ),
        )
    )


TABLE2 = (
    PaperRow("humaneval", "autoregressive", PLAIN, {"CodeLLaMA-13B speedup": "1.000x"}),
    PaperRow("humaneval", "self-speculative", ADAPTIVE, {"CodeLLaMA-13B speedup": "1.345x"}),
)
TABLE3 = tuple(
    PaperRow("cnn-dm", f"fixed K={tokens}", f"{{draft}}@fixed:tokens={tokens}", dict(figures))
    for tokens, figures in (
        (2, {"13B accepted": "92.4%", "13B speedup": "1.37x"}),
        (4, {"13B speedup": "1.44x"}),
        (6, {}),
        (8, {}),
    )
)
TABLE4 = (
    *(
        PaperRow(
            "cnn-dm",
            f"static gamma={gamma}",
            f"{{draft}}@confidence:tokens=12,threshold={gamma}",
            dict(figures),
        )
        for gamma, figures in (
            (0.2, {"13B accepted": "74.9%", "13B speedup": "1.38x"}),
            (0.4, {}),
            (0.6, {}),
            (0.8, {"13B accepted": "93.5%", "13B speedup": "1.55x"}),
        )
    ),
    PaperRow("cnn-dm", "adaptive gamma", ADAPTIVE, {"13B speedup": "1.57x"}),
)
TABLE5 = (
    PaperRow("cnn-dm", "autoregressive", PLAIN),
    PaperRow("cnn-dm", "self-speculative", ADAPTIVE, {"13B draft share": "most of the time"}),
)
OWN_TOKENS = (2048, 10240)  # that the model writes itself and a draft is trained on
_SHARES = "attention_share=0.6,mlp_share=0.3"  # 24 attention and 12 MLP halves of 40 layers
TABLE7 = (
    *(
        PaperRow(
            "cnn-dm",
            name,
            f"layer-skip:strategy={strategy},{_SHARES}@adaptive:tokens=12",
            {"13B speedup": "hardly any"},
        )
        for name, strategy in (
            ("first", "first"),
            ("middle", "middle"),
            ("last", "last"),
            ("random", "random"),
        )
    ),
    PaperRow("cnn-dm", "searched (ours: {draft})", ADAPTIVE, {"13B speedup": "1.57x"}),
)
_TRAINED = f"{DRAFT}@adaptive:tokens=12,target=0.9"
TABLE9 = (
    PaperRow(SUMMARIES, "autoregressive", PLAIN, {"13B speedup": "1.00x"}),
    PaperRow(SUMMARIES, "not trained", _TRAINED, {"13B accepted": "69.5%", "13B speedup": "1.15x"}),
    *(
        PaperRow(SUMMARIES, f"ours: draft-lora, {count:,} tokens", _TRAINED, copy=f"lora {count}")
        for count in OWN_TOKENS
    ),
    *(
        PaperRow(
            SUMMARIES,
            f"whole draft, {count:,} tokens (theirs 60M)",
            _TRAINED,
            {"13B accepted": "90.0%", "13B speedup": "1.96x"} if count == OWN_TOKENS[-1] else {},
            copy=f"whole {count}",
        )
        for count in OWN_TOKENS
    ),
)
TABLE10 = tuple(
    PaperRow(
        "cnn-dm",
        f"at most K={tokens}",
        f"{{draft}}@adaptive:tokens={tokens},target=0.9",
        {"13B speedup": "about the same"},
    )
    for tokens in (4, 8, 12, 16)
)
TABLE13 = (
    PaperRow("gsm8k", "autoregressive", PLAIN, {"13B speedup": "1.00x"}),
    PaperRow("gsm8k", "self-speculative", ADAPTIVE, {"13B speedup": "1.35x"}),
    PaperRow(
        "conversation",
        "self-speculative, MT-bench",
        "{draft}@adaptive:tokens=12,target=0.85",
        {"13B speedup": "1.27x"},
    ),
)
TABLE15 = tuple(
    PaperRow(task, name, method)
    for task in BOTH
    for name, method in (("autoregressive", PLAIN), ("self-speculative", ADAPTIVE))
)
COPY = "copy@fixed:tokens=6"  # a copy drafts for the model: ours, the paper's drafts skip layers


def _copies(name: str, copy: str, figures: dict[str, str]) -> tuple[PaperRow, ...]:
    """A copy decodes, and drafts for itself by skipping layers, as in the paper."""
    return (
        PaperRow(SUMMARIES, f"{name}, autoregressive", PLAIN, figures, copy=copy),
        PaperRow(SUMMARIES, f"{name}, self-speculative", ADAPTIVE, figures, copy=copy),
    )


TABLE11 = (
    *_copies("bf16 (ours float32)", "", {"13B VRAM": "nearly twice fp4's"}),
    *_copies("fp8 (ours int8)", "int8", {}),
    *_copies("fp4 and nf4 (ours int4)", "int4", {"13B VRAM": "19.6 GB (fp4)"}),
    *(
        PaperRow(SUMMARIES, f"ours: float32, its {copy} copy drafts", COPY, copy=copy)
        for copy in ("bfloat16", "int8", "int4")
    ),
)
_SPARSE = {"13B VRAM": "hardly less", "13B latency": "lower", "13B speedup": "slightly lower"}
TABLE12 = (
    *_copies("dense", "", {}),
    *(
        PaperRow(SUMMARIES, f"{mask}, self-speculative", ADAPTIVE, _SPARSE, copy=f"wanda {mask}")
        for mask in ("unstructured", "4:8", "2:4")
    ),
    *(
        PaperRow(
            SUMMARIES, f"ours: dense, its {mask} copy by {by} drafts", COPY, copy=f"{by} {mask}"
        )
        for by in ("magnitude", "wanda")
        for mask in ("unstructured", "4:8", "2:4")
    ),
)
SPEEDS = ("accepted", "tokens/s", "speedup")
COUNTED = ("accepted", "tokens a round", "memory, MB", "ms/token", "speedup")
ASKED = (
    "Theirs are CNN/DM's articles with one example before; ours Spec-Bench's, which come from it, "
    "as a chat (--task spec-bench=FILE)."
)
COMMON = (SEARCH, MACHINE)

DRAFT_VERIFY = (
    PaperTable(
        "dv-table1",
        PAPER,
        "Summaries, greedy",
        _main({"cnn-dm": "1.57x"}, 0.85),
        ("rouge2", *SPEEDS),
        draft=DRAFT,
        missing=BODY
        + " Over all models and temperatures it gives 1.210x to 1.992x; its 70B is the fastest.",
        apart=(*COMMON, "Both tasks are 1-shot there; our xsum is 0-shot."),
    ),
    PaperTable(
        "dv-table1-sampling",
        PAPER,
        "Summaries at temperature 0.2, top-p 0.85",
        _main({}, 0.85),
        ("rouge2", *SPEEDS),
        draft=DRAFT,
        temperature=0.2,
        top_p=0.85,
        missing=BODY,
        apart=(*COMMON, DRAWN),
    ),
    PaperTable(
        "dv-table2",
        PAPER,
        "HumanEval, greedy",
        TABLE2,
        ("pass@1", *SPEEDS),
        draft=DRAFT,
        missing=BODY,
        apart=(*COMMON, "pass@1 is of our greedy answers; pass@10 is dv-table2-sampling."),
    ),
    PaperTable(
        "dv-table2-sampling",
        PAPER,
        "HumanEval at temperature 0.6, top-p 0.95",
        tuple(
            PaperRow(row.task, row.name, row.method, {"CodeLLaMA-13B speedup": value})
            for row, value in zip(TABLE2, ("1.000x", "1.456x"), strict=True)
        ),
        ("pass@1", "pass@10", *SPEEDS),
        draft=DRAFT,
        temperature=0.6,
        top_p=0.95,
        samples=10,
        missing=BODY,
        apart=(
            *COMMON,
            DRAWN,
            "Samples are drawn with the drafter; each seed's text is plain decoding's, so both "
            "rows share them.",
        ),
    ),
    PaperTable(
        "dv-table3",
        PAPER,
        "Drafting a fixed number",
        TABLE3,
        SPEEDS,
        draft=DRAFT,
        missing=BODY,
        apart=COMMON,
    ),
    PaperTable(
        "dv-table4",
        PAPER,
        "Stopping at a confidence",
        TABLE4,
        SPEEDS,
        draft=DRAFT,
        missing=BODY,
        apart=COMMON,
    ),
    PaperTable(
        "dv-table5",
        PAPER,
        "Where the time goes",
        TABLE5,
        ("draft share", "verify share", "ms/token", "speedup"),
        draft=DRAFT,
        missing=BODY,
        apart=(*COMMON, "Attention and MLP are not timed apart here."),
    ),
    PaperTable(
        "dv-table7",
        PAPER,
        "Which halves are skipped",
        TABLE7,
        SPEEDS,
        draft=DRAFT,
        missing=BODY,
        apart=COMMON,
    ),
    PaperTable(
        "dv-table9",
        PAPER,
        "Most of the attention left out, and the draft trained",
        TABLE9,
        ("first right", "accepted", "tokens a round", "ms/token", "speedup"),
        TRAINED,
        draft=DRAFT,
        missing=BODY + " Trained on 75 million tokens it gets a little slower again.",
        apart=(
            MACHINE,
            ASKED,
            "Theirs is trained on 25 million tokens of the Pile, three times over; ours on the "
            "model's own answers to those of Spec-Bench's questions that are not asked.",
            "Their halves are those that their search leaves out most often, 30 of 40 attention "
            "and 13 of 40 MLP. Ours, in the same shares, are those without which the model's own "
            "text stays likeliest.",
        ),
    ),
    PaperTable(
        "dv-table10",
        PAPER,
        "The most drafts a round",
        TABLE10,
        SPEEDS,
        draft=DRAFT,
        missing=BODY,
        apart=COMMON,
    ),
    PaperTable(
        "dv-table11",
        PAPER,
        "With weights in fewer bits",
        TABLE11,
        COUNTED,
        COPIES,
        draft=DRAFT,
        missing=BODY,
        apart=(
            *COMMON,
            ASKED,
            "Their formats are bitsandbytes' fp8, fp4 and nf4, ours int8 and int4 in groups of 32; "
            "the head is left alone in both. Memory is that of all products, ours without the "
            "cache.",
        ),
    ),
    PaperTable(
        "dv-table12",
        PAPER,
        "With half of the weights zero",
        TABLE12,
        COUNTED,
        COPIES,
        draft=DRAFT,
        missing=BODY,
        apart=(
            *COMMON,
            ASKED,
            "No kernel here uses zeros: masked weights are stored and multiplied like others. "
            "Wanda's calibration text is yours (--task text=FILE), theirs is C4.",
        ),
    ),
    PaperTable(
        "dv-table13",
        PAPER,
        "Mathematics and conversation",
        TABLE13,
        ("accuracy", *SPEEDS),
        draft=DRAFT,
        missing=BODY,
        apart=(
            *COMMON,
            "Their MT-bench is judged by GPT-4 and sampled; here Spec-Bench's conversations "
            "(--task spec-bench=FILE), greedy.",
        ),
    ),
    PaperTable(
        "dv-table15",
        PAPER,
        "Summaries by three measures",
        TABLE15,
        ("rouge1", "rouge2", "rougeL", "speedup"),
        draft=DRAFT,
        missing=BODY,
        apart=COMMON,
    ),
)

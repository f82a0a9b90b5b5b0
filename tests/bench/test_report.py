"""Tables from a run whose numbers are known by heart."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_schema import PROVENANCE

from benchmarks.plain.__main__ import tables_of
from benchmarks.plain.report import (
    costs_table,
    decode_seconds,
    markdown,
    peer_table,
    summary,
    verify_table,
)
from benchmarks.plain.results import CostCard, PeerRow, PlainRun, VerifyPoint
from selfspec.bench.html import Table
from selfspec.bench.schema import write
from selfspec.bench.tables import table
from selfspec.errors import OptionError


def a_run() -> PlainRun:
    """11 tokens: the reference takes 20 ms for each after the first, ours 10, one lost and one fell
    over."""
    rows = [
        PeerRow("transformers", 64, 11, [0.1] * 3, [0.3] * 3, True),
        PeerRow("broken", 64, 11, failure="no answer | within 3 s"),
        PeerRow("loser", 64, 11, [0.2] * 3, [0.6] * 3, False, 4),
        PeerRow("selfspec", 64, 11, [0.05] * 3, [0.15] * 3, True),
        PeerRow("noisy", 64, 11, [0.3, 0.1, 0.3], [0.2, 0.2, 0.2], None),
    ]
    verify = [
        VerifyPoint(context, n, [0.010 * n**0.1 * (context / 64)] * 3)
        for context in (64, 512)
        for n in (1, 8)
    ]
    cost = CostCard(
        500_000_000,
        {"sum": [20e9, 25e9], "dot": [1e9]},
        [0.025, 0.024, 0.026],
        [0.030, 0.031, 0.029],
        64,
    )
    return PlainRun(
        PROVENANCE,
        "demo",
        "float32",
        "transformers",
        3,
        rows,
        {"selfspec": cost},
        verify,
        complete=True,
    )


def line(text: str, first: str) -> list[str]:
    """The cells of the table line that starts with this cell."""
    found = [
        row.strip("|").split("|") for row in text.splitlines() if row.startswith(f"| {first} ")
    ]
    assert len(found) == 1, f"{len(found)} lines for {first!r} in\n{text}"
    return [cell.strip() for cell in found[0]]


def test_times_and_ratios_of_a_peer() -> None:
    """Catches a ratio upside down (a slow peer called fast) and seconds called milliseconds."""
    text = table(peer_table(a_run(), 64))
    assert line(text, "selfspec")[1:] == [
        "10.0",
        "100.0",
        "2.00 (2.00-2.00)",
        "50.0",
        "2.00 (2.00-2.00)",
        "yes",
    ]
    assert line(text, "loser")[1:] == [
        "40.0",
        "25.0",
        "0.50 (0.50-0.50)",
        "200.0",
        "0.50 (0.50-0.50)",
        "no, differs at 4",
    ]


def test_rows_that_fail_or_lose_stay_in() -> None:
    """Catches a table that keeps only what looks good; a bar in a message must not break the table
    either."""
    text = table(peer_table(a_run(), 64))
    assert line(text, "broken")[1:] == ["-", "-", "-", "-", "-", "failed: no answer / within 3 s"]
    order = [row.split("|")[1].strip() for row in text.splitlines()[2:]]
    assert (
        set(order) == {"transformers", "broken", "loser", "selfspec", "noisy"}
        and order[-1] == "broken"
    )
    assert order.index("selfspec") < order.index("transformers") < order.index("loser")


def test_a_difference_lost_in_noise_has_no_ratio() -> None:
    """Catches 'minus 1.5 times as fast': T(n) was below T(1)."""
    cells = line(table(peer_table(a_run(), 64)), "noisy")
    assert cells[2] == "-" or float(cells[2]) > 0
    assert cells[3] == "lost in noise"
    assert cells[6] == "not compared"


def test_without_the_reference_there_are_times_but_no_ratios() -> None:
    """Catches a crash, or a ratio to somebody else, when the reference was left out."""
    run = a_run()
    run.peers = [row for row in run.peers if row.peer != "transformers"]
    assert line(table(peer_table(run, 64)), "selfspec")[1:5] == ["10.0", "100.0", "-", "50.0"]


def test_the_cost_card_compares_with_the_floor() -> None:
    """Catches a floor from the average, or from a slow way of reading, instead of the best that
    memory was seen to give."""
    text = markdown(a_run())
    assert line(text, "floor: 500 MB of weights at 25.0 GB/s")[1:] == ["20.0", "1.00"]
    assert line(text, "matrix products alone")[1:] == ["25.0", "1.25"]
    assert line(text, "our whole step")[1:] == ["30.0", "1.50"]
    assert "The step takes 1.20 (1.12-1.29) times its products" in text, (
        "0.030/0.025, 0.031/0.024, 0.029/0.026: paired by round"
    )


def test_cards_of_several_kinds_of_weights_share_a_table() -> None:
    """Catches the floor of one kind beside the step of another."""
    run = a_run()
    few = CostCard(100_000_000, {"sum": [20e9]}, [0.006], [0.0075] * 3, 64)
    run.costs["selfspec:int8"] = few
    text = markdown(run)
    assert line(text, "selfspec:int8")[1:] == ["100", "5.00", "6.00", "7.50", "1.50"]
    assert line(table(costs_table(run.costs)), "selfspec")[-1] == "1.50"
    assert "our whole step |" not in text


def test_verifying_is_compared_at_its_own_context() -> None:
    """Catches verify(8) at 512 divided by decode(1) at 64, which would be 8 times as much here."""
    text = table(verify_table(a_run()))
    assert line(text, "decode(1), ms")[1:] == ["10.0", "80.0"]
    assert line(text, "verify(8)/decode(1)")[1:] == ["1.23 (1.23-1.23)"] * 2


def test_the_summary_has_what_we_steer_by() -> None:
    """Catches a last line of JSON that says something else than the tables."""
    found = summary(a_run())
    assert found["decode_ms"]["selfspec@64"] == pytest.approx(10) and found["first_token_ms"][
        "selfspec@64"
    ] == pytest.approx(50)
    assert found["speed_over"] == {
        "transformers@64": pytest.approx(2),
        "loser@64": pytest.approx(4),
    }, "noise is no figure"
    assert found["step_over_products"]["selfspec"] == pytest.approx(1.2, abs=0.05)
    assert found["verify8_over_decode1"] == {
        "64": pytest.approx(1.23, abs=0.01),
        "512": pytest.approx(1.23, abs=0.01),
    }
    assert found["identical"]["loser@64"] is False and "broken@64" not in found["decode_ms"]


def test_the_report_is_made_from_the_file(tmp_path: Path) -> None:
    """Catches numbers in a table that the file does not have."""
    write(a_run(), tmp_path / "run.json")
    assert tables_of(tmp_path / "run.json") == markdown(a_run())


def test_an_interrupted_run_says_so() -> None:
    """Catches half a run quoted as a whole one."""
    run = a_run()
    assert "interrupted" not in markdown(run)
    run.complete, run.costs, run.verify, run.peers = False, {}, [], run.peers[:1]
    assert "**interrupted**" in markdown(run)


def test_a_table_is_one_in_markdown() -> None:
    """Catches lines of different widths and a missing rule, which Markdown shows as running
    text."""
    lines = table(Table(["a", "b"], [["x", "1"], ["yy", "22"]])).splitlines()
    assert lines == ["| a  |  b |", "|----|---:|", "| x  |  1 |", "| yy | 22 |"]


def test_decode_time_is_what_the_tokens_after_the_first_take() -> None:
    """Catches prefill counted as decoding, and division by n instead of n - 1; rounds keep their
    places."""
    assert decode_seconds([7.0, None, 9.0], [1.0, 1.0, None], 4) == [2.0, None, None]
    with pytest.raises(OptionError, match="at least 2"):
        decode_seconds([1.0], [1.0], 1)

"""The documents keep up with the code: links and tests that they name exist, defaults that they
state are the code's."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
import typer

from selfspec.cli.app import app
from selfspec.cli.drafters import known, options_of
from selfspec.control.registry import BUILT_IN as CONTROLLERS
from selfspec.draft.auto import Auto
from selfspec.draft.registry import BUILT_IN as DRAFTERS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEFAULT = re.compile(r"`([a-z-]+)\.([a-z_]+)=([^`]+)`")


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Catches a renamed file, and a heading that was reworded under a link that points at it."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target} leads nowhere"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name}: {target} names no heading"


def slug(heading: str) -> str:
    """The anchor that hosts make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    """A page that says 'proved by' and names a test that was renamed proves nothing."""
    text = page.read_text(encoding="utf-8")
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in (ROOT / "tests").rglob("*.py")
    }
    files = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert files <= set(sources), f"no such file: {files - set(sources)}"
    defined = {
        name
        for source in sources.values()
        for name in re.findall(r"^def ((?:test|check)_\w+)", source, re.MULTILINE)
    }
    named = set(re.findall(r"`((?:test|check)_\w+)`", text))
    assert named <= defined, f"no such test: {named - defined}"


def test_commands_that_are_shown_can_be_typed() -> None:
    """A command or a flag that was renamed: the first thing that a newcomer copies from a page
    would fail."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    flags = {
        name: {flag for each in found.params for flag in (*each.opts, *each.secondary_opts)}
        for name, found in commands.items()
    }
    shown = 0
    for page in [*PAGES, ROOT / "benchmarks/README.md"]:
        for block in re.findall(
            r"^```(?:bash|sh|console)\n(.*?)^```",
            page.read_text(encoding="utf-8"),
            re.MULTILINE | re.DOTALL,
        ):
            for line in block.replace("\\\n", " ").splitlines():
                for name, rest in re.findall(r"(?:^|[$|&] *)selfspec ([a-z-]+)([^|#\n]*)", line):
                    shown += 1
                    assert name in flags, f"{page.name}: selfspec {name}"
                    unknown = (
                        set(re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", rest))
                        - flags[name]
                        - {"--help"}
                    )
                    assert not unknown, f"{page.name}: selfspec {name} has no {unknown}"
    assert shown > 30, "the notation changed, and nothing is compared any more"


def test_same_output_names_its_tests() -> None:
    """Without a single name in it the test above would pass over nothing."""
    assert len(re.findall(r"`(?:test|check)_\w+`", text_of("same-output.md"))) > 10


def test_stated_defaults_are_the_codes() -> None:
    """Catches an option that was renamed or has another default by now than the page tells people
    who compare with a paper."""
    classes = {name: kind for group in known() for name, kind in group.items()}
    stated = DEFAULT.findall(text_of("papers.md"))
    assert len(stated) > 30, "the notation changed, and nothing is compared any more"
    for name, field, value in stated:
        defaults = {option.name: option.default for option in options_of(classes[name])}
        assert defaults.get(field) == value, (
            f"papers.md: {name}.{field}={value}, the code says {defaults.get(field)}"
        )


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_is_described(name: str) -> None:
    """A drafter that joined the registry and no page: nobody would find it."""
    described = 'draft="auto"' if name == "auto" else f"| `{name}` |"  # auto chooses among these
    assert described in text_of("how-it-works.md")


@pytest.mark.parametrize("name", CONTROLLERS)
def test_every_controller_is_described(name: str) -> None:
    """The same of controllers."""
    assert f"| `{name}` (" in text_of("choosing.md")


def test_controllers_come_with_their_defaults() -> None:
    """The table of controllers names one option of each with its default, in brackets."""
    classes = known()[1]
    stated = re.findall(
        r"^\| `([a-z-]+)` \(`(\w+)=([^`]+)`\)", text_of("choosing.md"), re.MULTILINE
    )
    assert {name for name, _, _ in stated} == set(CONTROLLERS)
    for name, field, value in stated:
        assert {option.name: option.default for option in options_of(classes[name])}[
            field
        ] == value, name


def test_auto_tries_what_the_page_says() -> None:
    """choosing.md says what the default begins with."""
    page = text_of("choosing.md")
    assert Auto().candidates == ("hybrid", "quantised", "early-exit")
    assert "begins with a lookup and token recycling, soon tries a copy of the model" in page
    assert "looks now and then at an early exit" in page


def test_the_curve_of_verifying_is_what_was_measured() -> None:
    """A table that outlived its measurement, in the page that says why the cost of verifying
    decides."""
    from benchmarks.plain import report, results
    from selfspec.bench.schema import read

    run = read(results.PlainRun, ROOT / "benchmarks/results/plain-amd-epyc.json")
    found = re.findall(r"^\| context (\d+) \| (.*) \|$", text_of("how-it-works.md"), flags=re.M)
    assert {int(context) for context, _ in found} == {point.context for point in run.verify}
    for context, cells in found:
        ratios = report.verify_ratios(run, int(context))
        assert cells.split(" | ") == [
            f"{ratios[count].value:.2f}" for count in (1, 2, 3, 4, 5, 8, 12, 16)
        ]


def test_the_tables_of_drafters_are_what_was_measured() -> None:
    """The same for the page that says which drafter to choose: every cell of a contestant's row is
    one that the results print."""
    from selfspec.bench import schema, suite_report

    printed: dict[str, set[str]] = {}
    for name in ("spec", "suite"):
        run = schema.read(schema.SuiteRun, ROOT / f"benchmarks/results/{name}-amd-epyc.json")
        for contestant, *cells in _table_rows(suite_report.markdown(run)):
            printed.setdefault(contestant, set()).update(cells)
    quoted = [row for row in _table_rows(text_of("choosing.md")) if "failed" not in row[-1]]
    assert len(quoted) > 30
    for contestant, *cells in quoted:
        assert set(cells) - {"1 of 12 differs"} <= printed[contestant], contestant


def _table_rows(text: str) -> list[list[str]]:
    rows = [
        line.strip("| \n").split("|")
        for line in text.splitlines()
        if re.match(r"\| [a-z-]+/\S+ +\|", line)
    ]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_table_of_quality_is_what_was_measured() -> None:
    """The same for what fewer bits do to perplexity, to the next token and to answers."""
    from benchmarks import quality
    from selfspec.bench.schema import read

    run = read(quality.QualityRun, ROOT / "benchmarks/results/quality-amd-epyc.json")
    printed = [line for line in quality.tables(run).splitlines() if line.startswith("|")]
    page = text_of("choosing.md").splitlines()
    assert len(printed) == 2 + len(run.ways) >= 7
    first = page.index(printed[0])
    assert page[first : first + len(printed)] == printed


@pytest.mark.parametrize("part", ["", "-text"])
def test_the_tables_of_quality_on_the_task_model_are_what_was_measured(part: str) -> None:
    """The same on a model whose weights were never of few bits."""
    from benchmarks import quality
    from selfspec.bench.schema import read

    run = read(quality.QualityRun, ROOT / f"benchmarks/results/quality-task{part}-amd-epyc.json")
    printed = [line for line in quality.tables(run).splitlines() if line.startswith("|")]
    assert len(printed) >= 5 and "\n".join(printed) in text_of("choosing.md")


def test_the_tables_of_engines_in_few_bits_are_what_was_measured() -> None:
    """The same for how fast others decode in 8 and 4 bits, and what it does to their
    perplexity."""
    from benchmarks.plain import report, results
    from selfspec.bench import tables
    from selfspec.bench.schema import read

    run = read(results.PlainRun, ROOT / "benchmarks/results/plain-weights-amd-epyc.json")
    assert run.complete
    found = [report.peer_table(run, 64), report.reading_table(run), report.costs_table(run.costs)]
    for each in found:
        assert len(each.rows) >= 4 and tables.table(each) in text_of("choosing.md")


def test_the_tables_of_copies_are_what_was_counted() -> None:
    """The same for Draft & Verify's tables with few bits and with zeros."""
    from benchmarks.paper import report, result, table
    from selfspec.bench.schema import read

    counted = set()
    for number in ("11", "12"):
        file = ROOT / f"benchmarks/results/dv-table{number}-amd-epyc.json"
        spec, run = table.find_table(f"dv-table{number}"), read(result.PaperResult, file)
        for name, *cells in report.cells(spec, run).rows:
            ours = cells[len(spec.columns) :][:3]
            if ours[0] != "-":
                counted.add((number, name.removeprefix("summarization: "), *ours))
    rows = re.findall(r"^\| (1[12]) \| (.*) \|$", text_of("measuring.md"), re.MULTILINE)
    assert {(number, *cells.split(" | ")) for number, cells in rows} == counted
    assert len(rows) == len(counted) > 10


def test_the_table_of_weights_is_what_was_measured() -> None:
    """The same for what a pass costs and how much memory it reads."""
    from benchmarks import formats
    from selfspec.bench.schema import read

    run = read(formats.FormatsRun, ROOT / "benchmarks/results/formats-amd-epyc.json")
    rows = re.findall(
        r"^\| `(\w+)`[^|]*\|[^|]*\| (\d+) MB \| ([\d.]+) \|$", text_of("choosing.md"), re.M
    )
    one = {kind.weights: statistics.median(kind.passes["64"]["1"]) for kind in run.kinds}
    assert [name for name, _, _ in rows] == [kind.weights for kind in run.kinds]
    for kind, (_, size, speed) in zip(run.kinds, rows, strict=True):
        assert int(size) == round(kind.bytes / 1e6)
        assert f"{one['float32'] / one[kind.weights]:.1f}" == f"{float(speed):.1f}", kind.weights


def test_the_tables_of_the_task_model_are_what_was_measured() -> None:
    """The same, for exact match, acceptance and speed of the model for one task."""
    printed = _task_lines()
    lines = [
        line
        for line in text_of("training.md").splitlines()
        if re.match(r"\| (plain|recipe|E=\d.*?) +\|.*%", line)
    ]
    assert len(lines) >= 10 and set(lines) <= set(printed)


def _task_lines() -> list[str]:
    from benchmarks.task import report, result
    from selfspec.bench.schema import read

    return report.markdown(
        read(result.TaskRun, ROOT / "benchmarks/results/task-amd-epyc.json")
    ).splitlines()


def test_the_tables_of_the_ablation_are_what_was_measured() -> None:
    """The same for the arms of the recipe as printed."""
    from benchmarks.recipe import report, result
    from selfspec.bench.schema import read

    file = ROOT / "benchmarks/results/recipe-amd-epyc-family-26-model-2.json"
    printed = report.markdown(read(result.RecipeRun, file)).splitlines()
    start = re.compile(r"\| (?:(?:scratch|task|own)/|the paper's LD\+EE )")
    lines = [line for line in text_of("training.md").splitlines() if start.match(line)]
    assert len(lines) >= 10 and set(lines) <= set(printed)


def test_the_times_of_a_training_step_are_what_was_measured() -> None:
    """The same for the page on training."""
    from benchmarks import steps
    from selfspec.bench.schema import read

    printed = steps.markdown(read(steps.StepsRun, ROOT / "benchmarks/results/steps-amd-epyc.json"))
    found = re.findall(
        r"^\| (?:plain|EE|LD\+EE|products) +\|[^%\n]*$", text_of("training.md"), re.MULTILINE
    )
    lines = sorted(set(found) - set(_task_lines()))
    assert len(lines) == 4 and set(lines) <= set(printed.splitlines())

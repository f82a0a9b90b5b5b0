"""The front of the command line: help, errors, unknown names, and how the shared options become
arguments of the library."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import typer

import selfspec
from selfspec import LLM, PromptError, SamplingParams
from selfspec.cli import app as app_module
from selfspec.cli import common
from selfspec.cli.app import app
from selfspec.cli.options import ModelOptions

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def panel(command: str, title: str) -> list[Any]:
    """The options that a command shows under a title."""
    return [each for each in COMMANDS[command].params if each.rich_help_panel == title]


def test_the_module_is_the_command_line() -> None:
    """Catches a package that cannot be run by its name, or that calls itself something else."""
    module = [sys.executable, "-m", "selfspec"]
    done = subprocess.run([*module, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()[-1]) == (0, selfspec.__version__), done.stderr
    done = subprocess.run([*module, "unknown"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "python -m selfspec" in done.stderr


def test_help_does_not_wait_for_torch() -> None:
    """Catches a heavy import at the top of a module, which makes --help take seconds."""
    code = (
        "import sys\nfrom selfspec.cli.app import app\n"
        "try:\n    app(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported for --help: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout, "--help printed no help, so nothing was measured"


def test_a_command_does_not_wait_for_the_others() -> None:
    """Catches an import of all commands at the top, and a group that builds all of them to run one:
    both are a tenth of the time to the first token."""
    code = (
        "import sys\nfrom selfspec.cli import app, common\n"
        "def opened(*_): raise SystemExit(' '.join(sorted(sys.modules)))\n"
        "common.open_model = opened\n"
        "sys.argv = ['selfspec', 'generate', 'Hello', '--draft', 'none']\napp.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    found = set(done.stderr.split())
    assert "selfspec.cli.generate" in found, f"the command did not come to its model: {done.stderr}"
    others = {"selfspec.cli." + name for name in app_module.COMMANDS.values()}
    heavy = {"transformers", "torch._dynamo", "torch.distributed.tensor", "sympy", "tokenizers"}
    assert not found & (others | heavy) - {"selfspec.cli.generate"}


def test_no_garbage_is_looked_for_while_torch_is_imported() -> None:
    """Catches collections of objects that stay anyway, and a collector that stays off after it. An
    import that raises must leave it on, too."""
    code = (
        "import gc\nfrom selfspec.cli.common import importing\nseen = []\n"
        "gc.callbacks.append(lambda phase, info: seen.append(phase))\n"
        "with importing():\n    import torch\n    during = len(seen)\n"
        "kept = gc.get_freeze_count()\n"
        "print(during, gc.isenabled(), kept > 100_000)\n"
        "with importing():\n    print(gc.isenabled())\n"
        "del __import__('sys').modules['torch']\n"
        "try:\n    with importing():\n        raise ImportError\n"
        "except ImportError:\n    print(gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "True", "True", "True", "True"], done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_says_what_it_does_and_shows_an_example(name: str) -> None:
    """A help text that lists options only teaches nobody; each one starts with a sentence and ends
    with a command that works."""
    words = (COMMANDS[name].help or "").strip().splitlines()
    assert len(words[0]) > 20 and words[0][0].isupper(), (
        f"{name}: the help does not start with what the command does"
    )
    assert words[-1].strip().startswith(f"Example:  selfspec {name}"), (
        f"{name}: the help does not end with an example"
    )
    undocumented = [
        each.name for each in COMMANDS[name].params if not each.help and each.name != "help"
    ]
    assert not undocumented, f"{name}: no help for {undocumented}"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_no_option_is_declared_twice(name: str) -> None:
    """Of two options of one name the parser keeps one, and the other's value goes astray without a
    word."""
    flags = [
        flag
        for each in COMMANDS[name].params
        for flag in (*each.opts, *each.secondary_opts)
        if flag.startswith("-")
    ]
    assert len(flags) == len(set(flags)), (
        f"{name}: {sorted({flag for flag in flags if flags.count(flag) > 1})}"
    )


def test_version_is_the_packages_own(run: Any) -> None:
    """Catches a version that is written down twice and drifts."""
    result = run("--version")
    assert result.stdout.strip() == f"selfspec {selfspec.__version__}"


def test_an_error_is_one_message_and_no_traceback(run: Any) -> None:
    """Users must not be shown our stack for their typing mistake; scripts need the exit code."""
    result = run("generate", "demo", "hello", "--temperature", "-1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and "temperature" in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == "", "an error in a pipe would be read as the model's text"


def test_brackets_in_a_message_survive(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """rich reads [words in brackets] as styles and drops them; messages and paths contain
    brackets."""

    def refuse(*_: object) -> None:
        raise PromptError("no such thing: [red]model[/red] in [a folder]")

    monkeypatch.setattr(common, "open_model", refuse)
    result = run("generate", "demo", "hello")
    assert "error: no such thing: [red]model[/red] in [a folder]" in result.stderr


@pytest.mark.parametrize(("words", "variable"), [(["--traceback"], None), ([], "1")])
def test_traceback_on_request(
    run: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], variable: str | None
) -> None:
    """Who reports a bug needs the traceback; both ways to ask for it must work."""
    if variable:
        monkeypatch.setenv("SELFSPEC_TRACEBACK", variable)
    result = run(*words, "generate", "demo", "hello", "--temperature", "-1", crash=True)
    assert isinstance(result.exception, selfspec.OptionError)


def test_unknown_names_name_the_nearest(run: Any) -> None:
    """A typo must be answered with the right spelling, be it an option, a command or a drafter."""
    option = run("generate", "demo", "hello", "--max-new-token", "3")
    assert option.exit_code == 2 and "--max-new-tokens" in option.stderr
    command = run("generat", "hello")
    assert command.exit_code == 2 and "generate" in command.stderr
    drafter = run("generate", "demo", "hello", "--draft", "nonee")
    assert drafter.exit_code == 1 and "did you mean 'none'?" in drafter.stderr


def test_interrupt_is_quiet(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a model loads is no crash: exit code 130, as shells expect, and no traceback."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "open_model", interrupted)
    result = run("generate", "demo", "hello")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_sampling_options_are_those_of_the_library() -> None:
    """Catches a sampling parameter that was added to the library and forgotten here, or renamed on
    one side."""
    # token ids: for programs
    library = {field.name for field in dataclasses.fields(SamplingParams)} - {"logit_bias"}
    for name in ("generate", "chat"):
        assert {each.name for each in panel(name, "Sampling")} == library


@pytest.mark.parametrize("command", ["generate", "chat", "info"])
def test_model_options_reach_the_command(
    run: Any, opened: list[tuple[str, ModelOptions]], command: str
) -> None:
    """Catches an option that is accepted and then dropped on the way."""
    given = ModelOptions(
        "bfloat16",
        "cpu",
        3,
        "native",
        "float32",
        "v1",
        "secret",
        adapter="live",
        long_context=True,
        trust_remote_code=True,
    )
    words = [
        "--dtype",
        "bfloat16",
        "--device",
        "cpu",
        "--threads",
        "3",
        "--kernel",
        "native",
        "--weights",
        "float32",
        "--revision",
        "v1",
        "--token",
        "secret",
    ]
    prompt = ["hello", "-n", "1"] if command == "generate" else []
    words += ["--adapter", "live", "--long-context", "--trust-remote-code"]
    run(command, "some/model", *prompt, *words, stdin="")
    assert opened == [("some/model", given)]


def test_open_model_hands_everything_on(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The seam itself: each option arrives at from_pretrained under its own name."""
    seen: dict[str, Any] = {}

    def from_pretrained(name: str, **options: Any) -> LLM:
        seen.update(name=name, **options)
        return llm

    monkeypatch.setattr(LLM, "from_pretrained", from_pretrained)
    how = ModelOptions(
        "float16",
        "cuda:1",
        5,
        "static",
        "float32",
        "main",
        "t",
        adapter="merge",
        long_context=True,
        trust_remote_code=True,
    )
    assert common.open_model("m", how) is llm
    assert seen == {"name": "m", **dataclasses.asdict(how)}


def test_options_are_checked_before_the_model_is_loaded(
    run: Any, opened: list[tuple[str, ModelOptions]]
) -> None:
    """A wrong option found after a minute of loading is a minute lost."""
    for wrong in (["--temperature", "-1"], ["--draft", "magic"], ["--top-p", "0.5"]):
        assert run("generate", "demo", "hello", *wrong).exit_code == 1
        assert run("chat", "demo", *wrong, stdin="").exit_code == 1
    assert opened == []

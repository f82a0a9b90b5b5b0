"""`selfspec chat`: a conversation in the terminal. The library keeps what it has read of it."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError, SelfspecError, UnsupportedModel, nearest
from . import common, options, show
from .show import Writer

if TYPE_CHECKING:
    from ..llm import LLM

HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer."
COMMANDS = ("/help", "/quit", "/reset")


@options.grouped
def chat(
    name: options.Model = "demo",
    system: Annotated[
        str | None, typer.Option("--system", help="What the model is told before the first turn.")
    ] = None,
    *,
    sampling: options.Sampling,
    drafting: options.Drafting,
    model: options.Loading,
    max_new_tokens: options.MaxNewTokens = 512,
    stop: options.Stop = None,
    stats: options.ShowStats = False,
) -> None:
    """Talk with a model: answers come as they are written, and each turn builds on the ones before.

    In the conversation: /reset forgets it, /quit or Ctrl-D leaves, Ctrl-C stops an answer.

    Example:  selfspec chat demo --system "Answer in one sentence."
    """
    settings = common.settings_from(sampling, max_new_tokens, stop, drafting)
    llm = common.open_model(name, model)
    if not common.has_chat_template(llm):
        raise UnsupportedModel(
            f"{name} has no chat template, so it cannot tell turns apart; use selfspec generate, "
            "or its -Instruct version"
        )
    Conversation(llm, settings, system, stats, show.writer(llm, drafting.show_drafts)).run()


class Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(
        self, llm: LLM, settings: dict[str, Any], system: str | None, stats: bool, write: Writer
    ) -> None:
        self._llm, self._settings, self._stats, self._write = llm, settings, stats, write
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def run(self) -> None:
        """Read lines until the user leaves."""
        with suppress(ImportError):  # Windows: its console edits lines by itself
            import readline  # noqa: F401  (gives `input` arrow keys and a history)
        typer.echo(HELP)
        common.any_bytes()
        while (line := _ask()) is not None:
            if not line.startswith("/"):
                self._turn(line)
            elif not self._obey(line):
                return
        typer.echo()

    def _obey(self, command: str) -> bool:
        """Carry out a command; False leaves."""
        if command == "/reset":
            self.messages = list(self._start)
            typer.echo("The conversation is forgotten.")
        elif command == "/help":
            typer.echo(HELP)
        elif command != "/quit":
            word = command.split()[0]
            _complain(OptionError(f"{word} is not a command here; {nearest(word, COMMANDS)}"))
        return command != "/quit"

    def _turn(self, text: str) -> None:
        """One question and its answer. What cannot be answered is not kept."""
        if not text:
            return
        self.messages.append(common.user(text))
        try:
            answer = self._answer()
        except SelfspecError as error:
            answer = ""
            _complain(error)
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()

    def _answer(self) -> str:
        """Stream one answer. Ctrl-C ends it early and keeps what was said."""
        said: list[str] = []
        pieces = self._llm.stream_chat(self.messages, **self._settings)
        with closing(pieces):
            try:
                for piece in pieces:
                    said.append(piece.text)
                    self._write(piece)
            except KeyboardInterrupt:
                common.write(" [stopped]\n")
                return "".join(said)
        common.write("\n")
        if self._stats:
            common.print_stats([pieces.result.stats])
        return "".join(said)


def _ask() -> str | None:
    """A line, or None at the end (Ctrl-D). Ctrl-C clears the line."""
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            typer.echo("\n(Ctrl-D or /quit leaves)")


def _complain(error: SelfspecError) -> None:
    common.stderr().print(str(error), style="red", markup=False, soft_wrap=True)

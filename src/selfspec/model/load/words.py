"""A folder's tokenizer without transformers, which takes longer to import than to tokenize with.

`Words` does what writing and chatting need by the library that transformers uses itself, and leaves
all else to transformers' own tokenizer, which is read when it is first asked for. Whether it does
the same is found out once, at a first load (`words_of`). Does not know models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

FILE = "tokenizer.json"
_SAME = ("chat_template", "special_tokens_map", "all_special_ids", "padding_side",
         "model_max_length", "clean_up_tokenization_spaces", "model_input_names")  # fmt: skip
_OURS = ("__call__", "_encode_plus", "_batch_encode_plus", "decode", "_decode", "batch_decode",
         "convert_ids_to_tokens", "apply_chat_template", "added_tokens_decoder")  # fmt: skip
_TURNS = [{"role": "user", "content": " Hi, wörld!\n\n"}, {"role": "assistant", "content": "</s>"}]
_SYSTEM = {"role": "system", "content": "Be <brief>."}


class Words:
    """Stands for a tokenizer. `facts`: what `words_of` found."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer  # no part of a mere import of LLM

        self._folder, self._facts = folder, facts
        self.chat_template: str | None = facts["template"]
        self._fast = Tokenizer.from_file(str(folder / FILE))
        self._fast.no_truncation()
        self._fast.no_padding()
        self.added_tokens_decoder = self._fast.get_added_tokens_decoder()

    @cached_property
    def whole(self) -> Any:
        """Transformers' own tokenizer."""
        return from_class(self._folder, self._facts)

    @property
    def backend_tokenizer(self) -> Any:
        """The library's own tokenizer, which knows what each token says."""
        return self._fast

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what pickle and copy look for
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __call__(self, text: Any, add_special_tokens: bool = True, **more: Any) -> Any:
        if more or not isinstance(text, str):
            return self.whole(text, add_special_tokens=add_special_tokens, **more)
        return {"input_ids": self._fast.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, tokens: Sequence[int], **how: Any) -> str:
        if how.get("clean_up_tokenization_spaces", True):  # by its own setting
            text: str = self.whole.decode(tokens, **how)
        else:
            text = self._fast.decode(tokens, how.get("skip_special_tokens", False))
        return text

    def convert_ids_to_tokens(self, token: int) -> str | None:
        name: str | None = self._fast.id_to_token(token)
        return name

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tokenize: bool,
        **more: Any,
    ) -> str:
        """A conversation as text. What is no plain text is left to transformers."""
        text: str
        plain = self.chat_template and messages and not tokenize and not more
        if not plain or not all(_is_plain(each) for each in messages):
            text = self.whole.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=tokenize, **more
            )
            return text
        text = self._template.render(
            **self._facts["special"],
            messages=[dict(each) for each in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
        return text

    @cached_property
    def _template(self) -> Any:
        """Read as transformers reads templates: in a sandbox, as they are other people's code."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        return environment.from_string(self.chat_template or "")


def words_of(tokenizer: Any, folder: Path) -> dict[str, Any] | None:
    """What makes the same tokenizer again. {}: there is none. None: it needs more than its files.

    "template": only where `Words` was seen to do the same.
    """
    if tokenizer is None:
        return {}
    home, name = type(tokenizer).__module__, type(tokenizer).__name__
    if not home.startswith("transformers.") or not getattr(tokenizer, "is_fast", False):
        return None
    facts: dict[str, Any] = {"class": [home, name], "special": tokenizer.special_tokens_map}
    try:
        alone = from_class(folder, facts)
    except (OSError, TypeError, ValueError, KeyError, AttributeError, ImportError):  # needs more
        return None
    strings = {each.backend_tokenizer.to_str() for each in (tokenizer, alone)}
    if len(strings) > 1 or not all(
        getattr(tokenizer, each, None) == getattr(alone, each, None) for each in _SAME
    ):
        return None
    quick = {**facts, "template": tokenizer.chat_template}
    return quick if _does_the_same(quick, tokenizer, folder) else facts


def tokenizer_by(folder: Path, facts: Mapping[str, Any]) -> Any:
    """The tokenizer that was kept so. None: there is none."""
    if not facts:
        return None
    return Words(folder, facts) if "template" in facts else from_class(folder, facts)


def from_class(folder: Path, facts: Mapping[str, Any]) -> Any:
    """By its class alone: looking for the class would import models."""
    home, name = facts["class"]
    return getattr(import_module(home), name).from_pretrained(folder)


def _does_the_same(facts: dict[str, Any], tokenizer: Any, folder: Path) -> bool:
    """Whether `Words` has the same rules, and writes some conversations in the same way."""
    from transformers import PreTrainedTokenizerFast

    usual = PreTrainedTokenizerFast
    overridden = [
        each
        for each in _OURS
        if getattr(type(tokenizer), each, None) is not getattr(usual, each, None)
    ]
    template = facts["template"]
    if overridden or not (folder / FILE).is_file() or json.loads(json.dumps(facts)) != facts:
        return False
    if getattr(tokenizer, "split_special_tokens", False):
        return False
    words = Words(folder, facts)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    if words._fast.to_str() != backend.to_str():
        return False
    if template is None:
        return True
    if not isinstance(template, str):  # several, by name
        return False
    chats = [_TURNS[:1], [_SYSTEM, *_TURNS[:1]], [*_TURNS, *_TURNS[:1]], [_SYSTEM, *_TURNS * 2]]
    return all(
        _written(words, chat, asks) == _written(tokenizer, chat, asks)
        for chat in chats
        for asks in (True, False)
    )


def _written(tokenizer: Any, chat: list[dict[str, str]], asks: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(chat, add_generation_prompt=asks, tokenize=False)
    except Exception as error:  # noqa: BLE001  (a template is another's program)
        return f"{type(error).__name__}: {error}"
    return text


def _is_plain(message: Mapping[str, Any]) -> bool:
    return message.keys() == {"role", "content"} and all(
        type(each) is str for each in message.values()
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)

"""Going on with an answer that another server has begun.

Draws are counted by position and a row's bits do not depend on its company, so whoever knows the
seed and the tokens that were given can go on with the very text. Penalties, least lengths and
grammars count from where the answer began. Stops and limits are told of what was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.contract import RowStep
from ..core.text_stream import RowText
from ..engine.row import Request
from .problems import Problem

FIELD = "selfspec.resume"


def resumed(request: Request, text: RowText, given: Sequence[int]) -> tuple[Request, str]:
    """The request as it stands behind these tokens of its answer, and their text that was shown."""
    left = request.max_new_tokens - len(given)
    if left < 1:
        raise Problem(
            f"{FIELD} has {len(given)} tokens and the answer may have {request.max_new_tokens}, so "
            "it has ended; there is nothing to go on with",
            param=FIELD,
        )
    for number, token in enumerate(given):
        stopped = [check.push(token) for check in request.stop_checks]
        if token in request.eos or any(stopped):
            raise Problem(
                f"{FIELD} ends at its token {number + 1} of {len(given)}, as the answer did; there "
                "is nothing to go on with",
                param=FIELD,
            )
    shown = text.push(RowStep(0, list(given)))
    return replace(request, prompt=[*request.prompt, *given], max_new_tokens=left), shown

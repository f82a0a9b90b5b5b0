"""Prompts of exact lengths for timing: ordinary English, so that a model answers it as it would
answer a user.

Does not know models; it is given a function that turns text into ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

TEXT = """\
The lighthouse on the northern point had been dark for eleven years when the council decided to sell it. Nobody in the village
expected a buyer. The road to it washes out every autumn, the roof of the keeper's house has lost a third of its slates, and the
lamp itself was taken away to a museum on the mainland, where it stands behind a rope and turns once an hour for the
schoolchildren. So when a letter came from a retired clockmaker who wished to see the tower before the end of the month, the
clerk read it twice and then walked down to the harbour to ask whether anyone would take him out by boat.

He arrived on a Tuesday with one suitcase and a box of tools. He asked about the height of the stairs, the direction of the winter
wind, and how long the tide leaves the causeway dry. He wrote the answers into a small grey book. In the lamp room he measured
the iron ring that had carried the lens, and then he sat down on the floor beside it and did not say anything for a long time.

"It was driven by a weight," he explained to the boatman on the way back. "A weight on a cable, down the middle of the tower,
like a clock in a church. Somebody had to wind it every four hours. People think that a light like this is a matter of fire, or of
electricity, but it is a matter of time. Each light has its own rhythm, so that a captain can tell one from another. If it turns
a little too fast or a little too slowly, it tells him that he is somewhere else."

There are three things to consider when such a mechanism is rebuilt. First, the weight must fall evenly, which means that its
speed has to be governed by a pendulum, a fan, or some other kind of brake. Second, the bearing that carries the lens has to run
with very little friction; the old keepers floated it on a bath of mercury, which nobody would allow today. Third, the whole
machine must survive salt, cold and neglect. A modern motor would solve the first two of these problems in an afternoon, and it
would fail at the third within a year. For this reason the clockmaker drew up a plan that used bronze where the old one had used
steel, and a train of wheels that could be taken apart by one person with two spanners.

The council discussed the plan at its next meeting. The questions were about money, about insurance, and about who would wind the
machine. The answer to the last of them turned out to be the simplest. The school offered its oldest class, two pupils a week, and
"""


def prompt_ids(tokenize: Callable[[str], Sequence[int]], length: int) -> list[int]:
    """The first `length` ids of the text, which starts over as often as is needed."""
    once = list(tokenize(TEXT))
    assert once, "the tokenizer made nothing of the text"
    return (once * (length // len(once) + 1))[:length]

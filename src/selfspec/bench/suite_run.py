"""From what was typed to a run: the model's folder, questions as ids, contestants, the plan, and
where the result goes.

Does not measure and does not print.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.files import clear_left_over
from ..core.machine import cpu_name
from ..core.template import ids_of, written
from ..errors import OptionError
from ..model.load.placement import parse_device
from ..model.load.source import locate
from ..model.operations import check_weights
from .contestants import contestants
from .costs import CONTEXTS as STEP_CONTEXTS
from .engines import Engines
from .meters import EnergyMeter
from .peer_host import package_versions
from .peers import find_peers
from .prompts import Prompt, prompt_ids
from .provenance import gather, results_folder, slug
from .schema import OURS, PLAIN, Plan, Question, Sample, SuiteRun, continued
from .suite import LONGEST_BLOCK, Suite
from .tasks import Asked, Item, read_task

PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class Wishes:
    """What was asked for; each is an option of `selfspec bench`."""

    model: str = "demo"
    """The demo model, a folder, or a name on the hub."""
    task: Sequence[str] = ()
    """What to ask: NAME, read from the hub, or NAME=PATH. --list shows the names."""
    methods: tuple[str, ...] = ("auto",)
    """Ways to draft, separated by spaces: 'auto ngram:longest=3@fixed:tokens=6'."""
    peers: tuple[str, ...] = ()
    """Other engines, separated by spaces: 'transformers transformers/lookup:tokens=4'."""
    sample: int = 5
    """Ask this many questions of each task, evenly spread over it; 0 is all."""
    skip_bad: bool = False
    """Leave out lines that cannot be read, and list them."""
    chat: bool | None = None
    """Use the chat template, or not. By default as the task says."""
    contexts: tuple[int, ...] = ()
    """Lengths of the task 'long', prompt and answer. By default 2048,4096,8192."""
    new_tokens: int = 128
    """Write at most this many new tokens for an answer."""
    rounds: int = 1
    """How often each question is asked."""
    batches: tuple[int, ...] = (1,)
    """How many questions of a task are asked at once, several sizes in turn."""
    threads: int = 2
    """CPU threads of every engine."""
    dtype: str = "float32"
    """Number format of weights and cache: float32, bfloat16 or float16."""
    weights: str = "auto"
    """How weights are stored where that is no dtype: int8 or int4. Engines without it fail."""
    device: str = "cpu"
    """Where the model runs: auto, cpu, cuda or cuda:N."""
    temperature: float = 0.0
    """How varied the text is: 0 is greedy decoding, above it tokens are drawn."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that together have this probability; 1 is off."""
    seed: int = 0
    """Seed of the sampling: the same seed draws the same tokens again."""
    time_limit: float = 300.0
    """End an engine that has not answered after this many seconds."""
    minutes: float = 0.0
    """Begin nothing new after so long; the same command goes on. By default no limit."""
    costs: bool = False
    """Time isolated steps too, and compare with what the cost model predicts."""
    fresh: bool = False
    """Measure anew, over a result that is there."""

    def check(self) -> None:
        """Refuse what cannot be measured, before anything is loaded."""
        for name in ("threads", "rounds", "time_limit"):
            if (value := getattr(self, name)) <= 0:
                raise OptionError(
                    f"{name}={value}: nothing would be measured; give a number above 0"
                )
        check_weights(self.weights)
        if self.new_tokens < 2:
            raise OptionError(
                f"--max-new-tokens {self.new_tokens}: there is no token after the first to time; "
                "give at least 2"
            )
        if not self.batches or min(self.batches) < 1:
            raise OptionError(f"--batches {list(self.batches)}: a batch has at least 1 row")
        if not self.task:
            raise OptionError(
                "there is nothing to ask; name a task with --task (selfspec bench --list shows "
                "them)"
            )


@dataclass(frozen=True)
class Words:
    """The model's tokenizer, its limits and its end tokens."""

    tokenizer: Any
    context: int
    layers: int
    eos: Sequence[int]

    def encode(self, item: Item) -> list[int]:
        """A question as ids: through the chat template where it is one and the model has one."""
        if not self.chats(item):
            return list(self.tokenizer(item.text).input_ids)
        asked = [{"role": "user", "content": item.text}]
        return ids_of(self.tokenizer, written(self.tokenizer, asked, opening=True, what=item.id))

    def chats(self, item: Item) -> bool:
        return item.chat and bool(self.tokenizer.chat_template)

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids as text, without the end token."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def folder_of(model: str) -> Path:
    """The folder that all peers load: the demo model's, the named one, or what the hub gives."""
    source = locate(model, revision=None, token=None, trust=False)
    source.fetch_weights()
    if not (source.folder / "config.json").is_file():
        raise OptionError(
            f"the folder {source.folder.name!r} has no config.json, so no engine can load it; name "
            "a model's folder, 'demo', or a hub name (owner/name)"
        )
    return source.folder.resolve()


def words_of(folder: Path) -> Words:
    """Read what the harness itself must know of a model."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    file = folder / "generation_config.json"
    said = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    eos = said.get("eos_token_id")
    eos = tokenizer.eos_token_id if eos is None else eos
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return Words(tokenizer, config.max_position_embeddings, config.num_hidden_layers, eos)


def read_tasks(wishes: Wishes) -> list[Asked]:
    """Every task's questions; no model is needed for them."""
    found: list[Asked] = []
    for text in wishes.task:
        for asked in read_task(text, wishes.sample, wishes.skip_bad, wishes.contexts, wishes.chat):
            if asked.sample.task in {each.sample.task for each in found}:
                raise OptionError(
                    f"two tasks are called {asked.sample.task!r}, and their questions would be "
                    "mixed; give one a category"
                )
            found.append(asked)
    return found


def ask(
    tasks: Sequence[Asked], words: Words, new_tokens: int
) -> tuple[list[Sample], list[Question], list[Prompt]]:
    """Every task's sample, its questions, and those as ids that fit into the context."""
    samples, questions, prompts = [], [], []
    for asked in tasks:
        samples.append(replace(asked.sample, chat=words.chats(asked.items[0])))
        for item in asked.items:
            ids, cut = fitted(item, words.encode(item), words.context, new_tokens)
            prompts.append(Prompt(item.task, item.id, ids))
            questions.append(Question(item.task, item.id, len(ids), cut))
    return samples, questions, prompts


def fitted(item: Item, ids: list[int], context: int, new_tokens: int) -> tuple[list[int], int]:
    """The ids that leave room for the answer, and how many were left out at the beginning (of a
    long context: at the end)."""
    room = (item.context or context) - new_tokens
    if item.context > context or room < 1:
        raise OptionError(
            f"{item.id} needs {item.context or new_tokens + 1} positions and this model has "
            f"{context}; lower --contexts or --max-new-tokens"
        )
    if not item.context:
        return ids[-room:], max(0, len(ids) - room)
    if len(ids) < room:
        raise OptionError(
            f"{item.id}: the text has only {len(ids)} tokens from there on, and {room} are wanted; "
            "give a longer text"
        )
    return ids[:room], 0


def prepare(wishes: Wishes, command: str, out: Path | None) -> Suite:
    """Check everything that can be checked before a peer is started."""
    wishes.check()
    known, tasks = find_peers(), read_tasks(wishes)
    folder = folder_of(wishes.model)
    words = words_of(folder)
    taking_part = contestants(wishes.methods, wishes.peers, known, words.layers)
    samples, questions, prompts = ask(tasks, words, wishes.new_tokens)
    name = wishes.model if "/" in wishes.model and not Path(wishes.model).exists() else folder.name
    device = str(parse_device(wishes.device)) if wishes.device == "auto" else wishes.device
    plan = Plan(
        name, wishes.dtype, device, wishes.threads, wishes.new_tokens, wishes.rounds,
        list(wishes.batches), [contestant.name for contestant in taking_part], f"{OURS}/{PLAIN}",
        samples, wishes.temperature, wishes.top_p, wishes.seed, wishes.weights,
    )  # fmt: skip
    target = out or results_folder() / f"suite-{slug(name)}-{slug(cpu_name())}.json"
    versions = {"selfspec": __version__, **package_versions(PACKAGES)}
    provenance = gather(command, wishes.threads, versions)
    run = open_run(SuiteRun(provenance, plan), target, wishes.fresh)
    run.questions = questions
    energy = EnergyMeter.find(gpu=device != "cpu")
    engines = Engines(
        known, folder, wishes.dtype, device, wishes.threads, wishes.time_limit, energy,
        weights=wishes.weights,
    )  # fmt: skip
    costs: list[int] = []
    if wishes.costs:
        longest = max(STEP_CONTEXTS) + 4 * LONGEST_BLOCK
        costs = prompt_ids(lambda text: list(words.tokenizer(text).input_ids), longest)
    return Suite(
        run, taking_part, prompts, engines, target, words.decode, words.eos, costs, wishes.minutes
    )


def open_run(new: SuiteRun, path: Path, fresh: bool = False) -> SuiteRun:
    """A new run, or the one in `path` if that is the same and was interrupted."""
    clear_left_over(path.parent, path.name)
    return new if fresh else continued(new, path, lambda run: vars(run.plan))

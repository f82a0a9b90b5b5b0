"""Our engine as a model of EleutherAI's lm-eval: its tasks on the whole model, or on one exit.

`simple_evaluate(model=lm_eval_model(llm), tasks=["arc_easy"])` scores the whole model. Tasks that
generate may use any drafter, the text stays the model's own. `lm_eval_model(llm, layer=8)` scores
what the first 8 layers alone would say, as in LayerSkip's Table 1 and Figures 6 to 8. lm-eval is
optional and imported here alone. Knows no tasks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.sampling import SamplingParams
from ..errors import OptionError, Unavailable
from ..llm import LLM
from ..lossy import early_exit_generate, first_layers

NEW_TOKENS = 256  # where a task does not say, as lm-eval's own models
POSITIONS = 128  # of which logits exist at a time


def lm_eval_model(llm: LLM, layer: int | None = None, **options: Any) -> Any:
    """What `lm_eval.simple_evaluate(model=...)` takes. With `layer` this exit alone is scored.

    `options` are those of `LLM.generate`, for tasks that generate."""
    if llm.tokenizer is None:
        raise OptionError("lm-eval needs words, and this model was loaded without a tokenizer")
    if layer is not None and layer != llm.model.layers:
        first_layers(llm.model, layer)  # refuses an exit that is not there
    return _model_class()(llm, None if layer == llm.model.layers else layer, options)


@functools.cache
def _model_class() -> Any:
    """Made once lm-eval is wanted, as it derives from a class of lm-eval's."""
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise Unavailable("lm-eval is not installed: pip install 'selfspec[lm-eval]'") from error
    return type("SelfspecLM", (Scored, TemplateLM), {})


class Scored:
    """What lm-eval asks of a model, for one model or one exit of it. Mixed with lm-eval's class."""

    cache_hook: Any

    def __init__(self, llm: LLM, layer: int | None, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._llm: Any = llm
        self._layer, self._options = layer, dict(options)
        self._model = llm.model if layer is None else first_layers(llm.model, layer)
        self.tokenizer: Any = llm.tokenizer
        self._device = llm.model.device

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return int(self._llm.info.context)

    @property
    def tokenizer_name(self) -> str:
        return str(self._llm.info.name).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, **special)["input_ids"])

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        answers = []
        for texts, context, continuation in requests:
            answer = self._score(context, continuation)
            answers.append(answer)
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        sums = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            sums.append(sum(self._score(*pair)[0] for pair in map(make_disjoint_window, windows)))
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = []
        for context, wishes in (request.args for request in requests):
            text = self._write(context, dict(wishes))
            self.cache_hook.add_partial("generate_until", (context, wishes), text)
            texts.append(text)
        return texts

    @torch.inference_mode()
    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Log-probability of a continuation, and whether it is what greedy decoding would write."""
        ids = [*context, *continuation][-self.max_length :][:-1]
        cache, model = self._model.new_cache(1, len(ids)), self._model
        x = model.embed(torch.tensor(ids, device=model.device))
        x = model.run(x, model.full_plan, cache, cache.layout([len(ids)]))[-len(continuation) :]
        wanted = torch.tensor(list(continuation), device=model.device)[-len(x) :]
        total, greedy = 0.0, True
        for states, following in zip(x.split(POSITIONS), wanted.split(POSITIONS), strict=True):
            logs = model.head(states).float().log_softmax(-1)
            total += float(logs.gather(1, following[:, None]).sum())
            greedy &= bool((logs.argmax(-1) == following).all())
        return total, greedy

    def _write(self, context: str, wishes: dict[str, Any]) -> str:
        stops = wishes.get("until") or []
        stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
        length = int(wishes.get("max_gen_toks", wishes.get("max_new_tokens", NEW_TOKENS)))
        ids = self.tok_encode(context)[-max(1, self.max_length - length) :]
        options = {"max_new_tokens": length, "stop": stops, "sampling": _sampling(wishes)}
        if self._layer is None:
            return str(self._llm.generate(ids, **{**self._options, **options}).text)
        options = {"draft": None, **self._options, **options}
        return str(early_exit_generate(self._llm, ids, self._layer, **options).text)


def _sampling(wishes: Mapping[str, Any]) -> SamplingParams | None:
    """lm-eval's words for sampling; greedy unless a task asks for more."""
    temperature = float(wishes.get("temperature") or 0.0)
    if not wishes.get("do_sample", temperature > 0) or temperature == 0:
        return None
    names = [name for name in ("top_p", "top_k", "min_p", "seed") if wishes.get(name) is not None]
    return SamplingParams(temperature=temperature, **{name: wishes[name] for name in names})

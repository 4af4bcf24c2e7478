"""Evaluates many models with lm-evaluation-harness, whose package this module needs.

The prompts of a task do not depend on the model. So the harness runs once to record its prompts,
all models answer all of them in one batch, and then the harness runs once for each model, to score
that model's answers:

    record ──> prompts x models ──> one batch ──> replay for each model ──> scores
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from weft.core.errors import ConfigError
from weft.core.requests import TokenLogprob
from weft.core.sampling import SamplingParams
from weft.llm import LLM, RequestOutput
from weft.text import Tokenizer

Scores = dict[str, dict[str, float]]
"""By task and metric."""

_SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
_MAX_GENERATED = 256
"""What the harness's own models generate at most, where a task does not say it."""
_BOOTSTRAPS = 1000


class Prompt(NamedTuple):
    """What is asked of each model."""

    ids: list[int]
    params: SamplingParams


class Said(NamedTuple):
    text: str
    prompt_logprobs: list[TokenLogprob | None] | None


@dataclass(frozen=True, slots=True)
class Asked:
    """Which tasks, and how they are asked."""

    tasks: tuple[str, ...]
    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False


class Harness:
    """Runs the tasks for models that answer elsewhere. Raises ConfigError for a task that is not
    known."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, max_model_len: int) -> None:
        for name in ("lm_eval", "lm-eval", "datasets"):
            logging.getLogger(name).setLevel(logging.ERROR)
        include = None if asked.include_path is None else str(asked.include_path)
        self._asked = asked
        self._manager = TaskManager(include_path=include)
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        unknown = [name for name in asked.tasks if not self._manager.match_tasks([name])]
        if unknown:
            message = f"there is no task {unknown[0]!r}; --include-path adds tasks of your own"
            raise ConfigError(message, "tasks")

    def prompts(self) -> list[Prompt]:
        """What the tasks ask."""
        recorder = _Recorder(self._tokenizer, self._max_model_len)
        self._run(recorder, predict_only=True)
        return recorder.prompts

    def scores(self, answers: Sequence[Said]) -> Scores:
        """The scores of the model that has given these answers, in the order of `prompts`."""
        results = self._run(_Player(self._tokenizer, self._max_model_len, answers))
        return {
            task: {
                metric.removesuffix(",none"): float(value)
                for metric, value in found.items()
                if isinstance(value, int | float) and metric not in ("sample_len", "sample_count")
            }
            for task, found in results["results"].items()
        }

    def _run(self, model: _Model, **options: bool) -> Mapping[str, Any]:
        asked = self._asked
        try:
            results: Mapping[str, Any] = simple_evaluate(
                model,
                tasks=list(asked.tasks),
                task_manager=self._manager,
                limit=asked.limit,
                num_fewshot=asked.num_fewshot,
                apply_chat_template=asked.apply_chat_template,
                log_samples=False,
                bootstrap_iters=_BOOTSTRAPS,
                **options,
            )
        except ValueError as error:  # such as more examples than a task has
            raise ConfigError(f"the tasks can't be run like this: {error}", "tasks") from error
        return results


class _Model(TemplateLM):  # type: ignore[misc]
    """A model as the harness knows it. Texts become prompts as with its own models: without the
    tokenizer's special tokens, unless they are written out."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        super().__init__()
        self._tokenizer, self._max_model_len = tokenizer, max_model_len

    def answers(self, prompts: list[Prompt]) -> list[Said]:
        """What the model says to these."""
        raise NotImplementedError

    @property
    def eot_token_id(self) -> int:
        if not self._tokenizer.eos_ids:
            raise ConfigError("the model's tokenizer has no token that ends texts", "tokenizer")
        return self._tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored from its first token on."""
        bos = self._tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._tokenizer.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        ids = self._tokenizer.chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return self._tokenizer.decode(ids)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        return self._tokenizer.encode(string, bool(add_special_tokens))

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        room = self._max_model_len - 1
        longest = max((len(end) for _text, _context, end in requests), default=0)
        if longest >= room:  # the first token of a prompt has no score
            message = f"a context of {self._max_model_len} tokens is too short to score {longest}"
            raise ConfigError(f"{message} tokens", "max_model_len")
        prompts = [Prompt((context + end)[-room:], _SCORED) for _text, context, end in requests]
        found: list[tuple[float, bool]] = []
        for (_text, _context, end), answer in zip(requests, self.answers(prompts), strict=True):
            logprobs = [each for each in (answer.prompt_logprobs or ())[-len(end) :] if each]
            total = sum(each.logprob for each in logprobs)
            found.append((total, all(each.rank == 1 for each in logprobs)))
        return found

    def loglikelihood_rolling(self, requests: list[Any], **_: object) -> list[float]:
        found: list[float] = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_model_len - 2,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(logprob for logprob, _ in self._loglikelihood_tokens(parts)))
        return found

    def generate_until(self, requests: list[Any], **_: object) -> list[str]:
        prompts = [self._generating(seed, *each.args) for seed, each in enumerate(requests)]
        return [answer.text for answer in self.answers(prompts)]

    def _generating(self, seed: int, context: str, options: dict[str, Any]) -> Prompt:
        most = int(options.get("max_gen_toks", options.get("max_tokens", _MAX_GENERATED)))
        ids = self.tok_encode(context)[-max(self._max_model_len - most, 1) :]
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else [each for each in until if each]
        params = SamplingParams(
            max_tokens=min(most, self._max_model_len - len(ids)),
            temperature=float(options.get("temperature", 1)) if options.get("do_sample") else 0.0,
            top_p=float(options.get("top_p", 1.0)),
            top_k=int(options.get("top_k", 0)),
            stop=tuple(until),
            seed=seed,
        )
        return Prompt(ids, params)


class _Recorder(_Model):
    """Writes down what it is asked."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        super().__init__(tokenizer, max_model_len)
        self.prompts: list[Prompt] = []

    def answers(self, prompts: list[Prompt]) -> list[Said]:
        self.prompts += prompts
        return [Said("", None)] * len(prompts)


class _Player(_Model):
    """Says what a model has answered to the same prompts."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, answers: Sequence[Said]) -> None:
        super().__init__(tokenizer, max_model_len)
        self._answers: Iterator[Said] = iter(answers)

    def answers(self, prompts: list[Prompt]) -> list[Said]:
        return [next(self._answers) for _ in prompts]


class Asking(NamedTuple):
    """What models have answered, and how long that took."""

    answers: list[list[Said]]
    """By model, in the order of the prompts."""
    seconds: float


def ask_together(
    llm: LLM,
    models: Sequence[str | None],
    prompts: Sequence[Prompt],
    on_finished: Callable[[RequestOutput], None] = lambda _: None,
) -> Asking:
    """Ask all models everything, in one batch. None stands for the base."""
    begin_s = time.perf_counter()
    outputs = llm.generate(
        [prompt.ids for prompt in prompts for _ in models],
        [prompt.params for prompt in prompts for _ in models],
        [model for _ in prompts for model in models],
        on_finished,
    )
    answers = [Said(output.text, output.prompt_logprobs) for output in outputs]
    seconds = time.perf_counter() - begin_s
    return Asking([answers[i :: len(models)] for i in range(len(models))], seconds)


def ask_one_by_one(llm: LLM, models: Sequence[str | None], prompts: Sequence[Prompt]) -> Asking:
    """Ask one model after the other."""
    rounds = [ask_together(llm, [model], prompts) for model in models]
    return Asking([each.answers[0] for each in rounds], sum(each.seconds for each in rounds))

"""Users' reward functions: loaded by name, checked by signature, called in their own convention.

    native    score(request) -> Verdict | float | None            group: score(requests) -> list of these
    verl      compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float}
    trl       f(prompts, completions, completion_ids, **columns) -> list of float or None
    openrlhf  reward_func(queries, prompts, labels, **kwargs) -> {"rewards": [...]} | list

The arguments, or `reward.style`, determine the convention. An async function scores many samples at once in
one process (`concurrency`), which suits one that waits for a service; one that computes or blocks should be a
plain function. None means "does not apply". Runs in a reward worker.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mrl.errors import ConfigError, RewardError
from mrl.rewards.contract import GroupVerifier, RewardRequest, Verifier, checked_value, scored
from mrl.rewards.reward_part import RewardPart, Style
from mrl.samples import Verdict, VerdictKind
from mrl.user_code import find_callable

_KEYWORDS = {
    "native": (),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "trl": ("prompts", "completions", "completion_ids"),
    "openrlhf": ("queries", "prompts", "labels"),
}
_SIGNS: dict[str, Style] = {
    "solution_str": "verl",
    "queries": "openrlhf",
    "completions": "trl",
    "completion_ids": "trl",
}
"""Argument name -> style of a function with it."""


def load_plugin(part: RewardPart) -> Verifier | GroupVerifier:
    """Return the verifier of a user's function; raise ConfigError if it is missing or unfit."""
    module, function = find_callable(part.path or "", setting="reward.path", kind="function")
    part = part.model_copy(update={"style": part.style or style_of(function)})
    check_signature(function, part)
    plugin = GroupPlugin if part.group else SinglePlugin
    return plugin(function, part, f"{part.style}:{part.path}", source_hash(module))


def check_signature(function: Callable[..., Any], part: RewardPart) -> None:
    """Raise ConfigError if the function cannot be called in its style."""
    signature = inspect.signature(function)
    keywords = _KEYWORDS[part.style or "native"]
    if part.style == "trl":  # further columns of the row may be required by name
        keywords = (*keywords, *(name for name in _required(signature) if name not in keywords))
    try:
        if keywords:
            signature.bind(**dict.fromkeys(keywords))
        else:
            signature.bind(None)
    except TypeError as error:
        arguments = ", ".join(keywords) or ("requests" if part.group else "request")
        raise ConfigError(
            f"reward.path = {part.path!r}: a {part.style} function is called with ({arguments}), but "
            f"this one has the signature {signature}: {error}. reward.style names another convention: "
            f"{', '.join(_KEYWORDS)}"
        ) from error


def style_of(function: Callable[..., Any]) -> Style:
    """Return the calling convention that a function's argument names imply."""
    names = inspect.signature(function).parameters
    for sign, style in _SIGNS.items():
        if sign in names:
            return style
    return "native"


def _required(signature: inspect.Signature) -> list[str]:
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind in named]


def is_async(function: Callable[..., Any]) -> bool:
    """Return True if a call of the function (or object with `__call__`) returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def source_hash(module: ModuleType) -> str:
    """Return 12 hex digits of the source file's SHA-256, to detect a change during the run."""
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else "unknown"


class _Plugin:
    def __init__(self, function: Callable[..., Any], part: RewardPart, name: str, version: str) -> None:
        self._function, self._part = function, part
        self.name, self.version = name, version
        self.waits = is_async(function)


class SinglePlugin(_Plugin):
    """Plug-in that scores one sample per call."""

    async def score(self, request: RewardRequest) -> Verdict | None:
        answers = await _call(self._function, self._part.style, [request], group=False)
        return _verdict(_only(answers, 1, self.name)[0], self._part, self.name)


class GroupPlugin(_Plugin):
    """Plug-in that scores all samples of a prompt in one call."""

    async def score_group(self, requests: Sequence[RewardRequest]) -> Sequence[Verdict | None]:
        answers = await _call(self._function, self._part.style, requests, group=True)
        return [
            _verdict(answer, self._part, self.name) for answer in _only(answers, len(requests), self.name)
        ]


async def _call(
    function: Callable[..., Any], style: Style | None, requests: Sequence[RewardRequest], *, group: bool
) -> Any:
    if style == "native":
        answer = function(list(requests)) if group else function(requests[0])
    elif style == "verl":
        return [await _awaited(function(**_verl_arguments(request))) for request in requests]
    elif style == "trl":
        answer = function(**_trl_arguments(requests))
    else:
        answer = function(**_openrlhf_arguments(requests))
    answer = await _awaited(answer)
    if style == "native" and not group:
        return [answer]
    if style == "openrlhf":
        return _openrlhf_answers(answer)
    return answer


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def _verl_arguments(request: RewardRequest) -> dict[str, Any]:
    extra = request.metadata.get("extra_info")
    return {
        "data_source": request.metadata.get("data_source") or request.tag or request.domain,
        "solution_str": request.response,
        "ground_truth": request.ground_truth,
        "extra_info": dict(extra) if isinstance(extra, dict) else extra or {},
    }


def _trl_arguments(requests: Sequence[RewardRequest]) -> dict[str, Any]:
    as_messages = bool(requests[0].messages)
    columns: dict[str, list[Any]] = {}
    for name in sorted(set().union(*(request.metadata for request in requests))):
        columns[str(name)] = [request.metadata.get(name) for request in requests]
    return {
        **columns,
        "prompts": [list(request.messages) if as_messages else request.prompt for request in requests],
        "completions": [
            [{"role": "assistant", "content": request.response}] if as_messages else request.response
            for request in requests
        ],
        "completion_ids": [[] if r.response_tokens is None else r.response_tokens.tolist() for r in requests],
    }


def _openrlhf_arguments(requests: Sequence[RewardRequest]) -> dict[str, Any]:
    return {
        "queries": [request.prompt + request.response for request in requests],
        "prompts": [request.prompt for request in requests],
        "labels": [request.ground_truth for request in requests],
    }


def _openrlhf_answers(answer: Any) -> Any:
    if isinstance(answer, dict):
        if "rewards" not in answer:
            raise RewardError(f"an openrlhf reward function must return 'rewards', not {sorted(answer)}")
        answer = answer["rewards"]
    return _listed(answer)


def _listed(answer: Any) -> Any:
    """Return arrays and tensors as lists, without importing their library."""
    return answer.tolist() if hasattr(answer, "tolist") and not isinstance(answer, np.generic) else answer


def _only(answers: Any, count: int, name: str) -> list[Any]:
    answers = _listed(answers)
    if isinstance(answers, int | float) and count == 1:
        answers = [answers]
    if not isinstance(answers, list | tuple):
        returned = "None" if answers is None else f"a {type(answers).__name__}"
        raise RewardError(
            f"verifier {name}: returned {returned}, not a list with a number for each of {count} responses"
        )
    if len(answers) != count:
        raise RewardError(f"verifier {name}: {len(answers)} rewards for {count} samples")
    return list(answers)


def _verdict(answer: Any, part: RewardPart, name: str) -> Verdict | None:
    if answer is None:
        return None
    if isinstance(answer, Verdict):
        if answer.kind is not VerdictKind.NO_REWARD:
            checked_value(answer.value, verifier=name)
        return answer
    if isinstance(answer, dict):
        if "score" not in answer:
            raise RewardError(
                f"verifier {name}: a reward object must have 'score'; this one has {sorted(map(str, answer))}"
            )
        numbers = {
            str(k): float(v) for k, v in answer.items() if k != "score" and isinstance(v, bool | int | float)
        }
        return scored(checked_value(answer["score"], verifier=name), "", **numbers)
    return scored(checked_value(answer, verifier=name))

"""Stream settings that cannot work are refused before anything starts, with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.files import CONFIGS

OWN = ("launch.engine_slots=1", "rollout.tp=1")
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "own slots without age": (
        ("stream.max_staleness=0", *OWN),
        "set max_staleness to 1 or more, sync_every above 1, or engine_slots 0",
    ),
    "deterministic with age": (
        ("loop.deterministic=true",),
        "needs stream.max_staleness 0, sync_every 1 and no algorithm.filter",
    ),
    "deterministic with a filter": (
        ("loop.deterministic=true", "stream.max_staleness=0", "algorithm.filter={max_rounds: 2}"),
        "no algorithm.filter",
    ),
    "a loss without a ratio": (
        ("algorithm.loss={name: reinforce}",),
        "set algorithm.old_logprobs: decoupled with a correction, choose a loss with a ratio, "
        "or max_staleness 0",
    ),
    "replaced on the trainer's slots": (
        ("rollout={tp: 1, max_replacements: 1}",),
        "rollout.max_replacements = 1 with engines on the trainer's slots; set launch.engine_slots, "
        "or replace 0",
    ),
    "replaced with routes": (
        (*OWN, "rollout.max_replacements=1", "routing.replay=engine"),
        "rollout.max_replacements = 1 with routing.replay = engine",
    ),
    "mode": (("stream.kv_cache=wait",), "Input should be 'recompute' or 'keep'"),
    "kept on the trainer's slots": (
        ("stream.kv_cache=keep",),
        "stream.kv_cache = keep with engines on the trainer's slots.*set launch.engine_slots",
    ),
    "kept and compared with one version": (
        (*OWN, "stream.kv_cache=keep", "loop.max_rollout_mismatch=1e-3"),
        "stream.kv_cache = keep with loop.max_rollout_mismatch = 0.001: .*set null",
    ),
    "age": (("stream.max_staleness=-1",), "greater than or equal to 0"),
}
ALLOWED = {
    "kept": (*OWN, "stream.kv_cache=keep", "loop.max_rollout_mismatch=null"),
    "mode b": ("stream={max_staleness: 0, sync_every: 2}", *OWN),
    "decoupled": (
        "algorithm={loss: {name: reinforce}, old_logprobs: decoupled, correction: {kind: truncated}}",
    ),
    "deterministic": ("loop.deterministic=true", "stream.max_staleness=0"),
}


def loaded(*words: str) -> Config:
    defaults = ("loop.schedule=stream", "loop.prompts_per_step=32", "run={name: run, folder: runs}")
    return load([Path(CONFIGS) / "quickstart.yaml"], [*defaults, *words])


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_stream_cannot_be_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(*words)


@pytest.mark.parametrize("words", ALLOWED.values(), ids=ALLOWED)
def test_what_is_close_to_it_is_allowed(words: tuple[str, ...]) -> None:
    loaded(*words)


def test_a_section_that_nobody_reads_and_an_unknown_schedule_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"stream is only read with loop\.schedule = stream"):
        loaded("loop.schedule=on_policy", "stream.max_staleness=2")
    with pytest.raises(ConfigError, match=r"unknown schedule 'async': .*known: on_policy, stream"):
        loaded("loop.schedule=async")

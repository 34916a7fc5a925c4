"""`mrl eval`: greedy reward, avg@k and pass@k of a model folder on any data file, with the run's verifier. One engine, no trainer, no
Ray; a measurement that was ended goes on where it was."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mrl.config.flat import flat
from mrl.config.root import Config
from mrl.data.identity import prompt_id
from mrl.data.load_rows import load_validation
from mrl.data.tokenise import tokenizer_of
from mrl.errors import ConfigError, DataError
from mrl.files import held, put_aside, replace_durably
from mrl.launch.commands import started
from mrl.launch.commands.contents import model_digest, reward_contents
from mrl.launch.commands.one_engine import one_engine
from mrl.launch.workers.acting import look_at
from mrl.loops.rollout_thread import RolloutThread
from mrl.loops.validate import Scores, greedy, validation_metrics, validation_sampling_of
from mrl.observe.samples_log import row_of
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rollout.request import Sampling
from mrl.rollout.seeds import request_id
from mrl.samples import Group, Prompt

SAMPLES, SUMMARY = "samples.jsonl", "summary.json"
MEASURED = (
    "model.chat_template_date",
    "model.max_length",
    "agent",
    "loop.validation.",
    "run.seed",
) + tuple(
    f"rollout.{name}"
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_response_tokens",
        "stop",
        "dtype",
        "quantization",
    )
)
"""How the names of settings begin that decide what is measured; the others may have changed when it goes on. Which model, which rows and
which rewards they are is told by what they hold, wherever that lies."""
SECONDS_BETWEEN = 10.0
"""From one line about how far it is to the next."""


def evaluate(config: Config, *, out: str | None = None) -> dict[str, float]:
    """`val/reward` (and `val/accuracy`, if it is one), `val/avg@k` and `val/pass@k` for k = loop.validation.num_samples, over data.validation.

    No training row is read. The folder `out` has a summary (the model, the settings, and at the end the metrics) and every sample
    from when it is judged, kind "validation" where greedy, else "sampled"; `score` is what the metrics are means of. What a call
    that was ended left there is not measured again. ConfigError where `out` has something else in it, or another command has it.
    """
    with held(Path(out), "--out") if out else contextlib.nullcontext():
        return _evaluate(config, out)


def _evaluate(config: Config, out: str | None) -> dict[str, float]:
    start, begun = time.monotonic(), _begun(Path(out)) if out else {}
    config = started.dated(config, begun.get("settings", {}).get("model", {}).get("chat_template_date"))
    tokenizer = tokenizer_of(config.model)
    acting = look_at(config, tokenizer)
    dataset = load_validation(
        config.data, config.reward, tokenizer, tools=acting.tools_of if acting else None
    )
    print(dataset.report.text(), file=sys.stderr, flush=True)
    prompts = dataset.validation_prompts(config.loop.validation.num_prompts)
    if not prompts:
        raise DataError("mrl eval measures data.validation, which is not given or has no rows left")
    results = Results(Path(out), begun, config, prompts) if out else None
    sampling = validation_sampling_of(config)
    _say(f"starting the engine, for {len(prompts)} prompts")
    with one_engine(config, tokenizer, acting, group_size=max(1, sampling.num_samples)) as rollouts:
        _say(f"the engine is up after {time.monotonic() - start:.0f} s")
        judged = partial(_measured, rollouts, prompts, results=results, reward=config.reward)
        responses, sampled = judged(greedy(sampling), "validation"), judged(sampling, "sampled")
    metrics = validation_metrics(responses, sampled, reward=config.reward)
    if results:
        results.end(metrics, seconds=time.monotonic() - start)
    return metrics


def _measured(
    rollouts: RolloutThread,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    kind: str,
    *,
    results: Results | None,
    reward: RewardSection,
) -> list[Scores]:
    """Of each prompt, those that are written down first."""
    if not sampling.num_samples:
        return []
    found = results.found(kind) if results else []
    start = told = time.monotonic()
    for group in rollouts.in_turn(prompts[len(found) :], sampling):
        found.append(Scores.of(group, reward))
        if results:
            results.add(kind, group, found[-1])
        if time.monotonic() > told + SECONDS_BETWEEN:
            told = time.monotonic()
            _say(f"{len(found)} of {len(prompts)} prompts ({kind})")
    _say(f"all {len(prompts)} prompts ({kind}) in {time.monotonic() - start:.0f} s")
    return found


def _say(text: str) -> None:
    print(f"eval: {text}", file=sys.stderr, flush=True)


class Results:
    """The folder that a measurement writes, and goes on from."""

    def __init__(
        self, folder: Path, begun: dict[str, Any], config: Config, prompts: Sequence[Prompt]
    ) -> None:
        """`begun`: the summary in the folder, empty for a new one. ConfigError where something else was measured there."""
        self._folder = folder
        self._about: dict[str, Any] = {
            "prompts": len(prompts),
            "rows": _digest_of(prompts),
            "reward": reward_contents(config.reward),
            "settings": config.model_dump(mode="json"),
        }
        if begun:
            self._require_same(_deciding(begun), _deciding(self._about))
        self._about["model"] = {"path": config.model.path, "sha256": model_digest(config.model.path)}
        if begun:
            self._require_same(*({"sha256": about["model"]["sha256"]} for about in (begun, self._about)))
        self._found = self._read(prompts, {"validation": 1, "sampled": config.loop.validation.num_samples})
        if begun:  # those of the samples that are there were compared by what they say
            self._require_same(*({"rows": about.get("rows")} for about in (begun, self._about)))
        folder.mkdir(parents=True, exist_ok=True)
        self._write(self._about)

    def found(self, kind: str) -> list[Scores]:
        """Of the first prompts, whose samples of this kind were there at the start."""
        return list(self._found[kind])

    def add(self, kind: str, group: Group, scores: Scores) -> None:
        """Writes the samples of the next prompt; an OSError of the disk is the caller's."""
        rows = [
            row_of(0, kind, group, sample) | {"score": score}
            for sample, score in zip(group.samples, scores.of_samples, strict=True)
        ]
        with (self._folder / SAMPLES).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def end(self, metrics: dict[str, float], *, seconds: float) -> None:
        """Nothing is added any more. `seconds`: of the call that ended it."""
        self._write({"metrics": metrics, "seconds": seconds} | self._about)

    def _write(self, summary: dict[str, Any]) -> None:
        replace_durably(self._folder / SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())

    def _require_same(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                raise self._of_another(f"{name} = {before.get(name)}, this is {now.get(name)}")

    def _of_another(self, why: str) -> ConfigError:
        return ConfigError(f"--out {self._folder} was begun with {why}; choose a new folder")

    def _read(self, prompts: Sequence[Prompt], sizes: dict[str, int]) -> dict[str, list[Scores]]:
        """The scores that are written down, by kind, of which a prompt has so many samples; those that are not all there are cut off, and from a damaged one on
        they are put aside."""
        sizes = {kind: size for kind, size in sizes.items() if size}
        found: dict[str, list[Scores]] = {kind: [] for kind in sizes}
        if not (self._folder / SAMPLES).exists():
            return found
        with (self._folder / SAMPLES).open("rb+") as file:
            for kind, prompt in itertools.product(sizes, prompts):
                begin, lines = file.tell(), [file.readline() for _ in range(sizes[kind])]
                if not lines[-1].endswith(b"\n"):
                    file.truncate(begin)
                    break
                if (rows := _rows(lines)) is None:
                    put_aside(self._folder / SAMPLES, [*lines, *file])
                    file.truncate(begin)
                    break
                self._require_of(prompt, kind, rows)
                found[kind].append(Scores(prompt.domain, prompt.tag, [row["score"] for row in rows]))
        return found

    def _require_of(self, prompt: Prompt, kind: str, rows: Sequence[dict[str, Any]]) -> None:
        asked = {"kind": kind, "prompt": prompt.text, "ground_truth": str(prompt.ground_truth)}
        for number, row in enumerate(rows):
            expected = asked | {"sample_id": request_id(prompt.index, number)}
            for name, value in expected.items():
                if row.get(name) != value:
                    raise self._of_another(f"{name} {row.get(name)!r} in {SAMPLES}, this is {value!r}")


def _rows(lines: Sequence[bytes]) -> list[dict[str, Any]] | None:
    """The rows of samples; None where one of the lines is damaged."""
    try:
        rows = [json.loads(line) for line in lines]
        scores = [row["score"] for row in rows]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return rows if all(score is None or isinstance(score, int | float) for score in scores) else None


def _begun(folder: Path) -> dict[str, Any]:
    """The summary of a measurement that has not ended; of a new or empty folder nothing."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return {}
    path = folder / SUMMARY
    try:
        summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(summary, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--out {folder}: {SUMMARY} is damaged ({error}), so that nobody knows what was measured; choose a new folder"
        ) from error
    if "metrics" in summary:
        raise ConfigError(f"--out {folder} has a measurement that has ended; choose a new folder")
    if "settings" not in summary:
        raise ConfigError(f"--out {folder} exists and is not empty; choose a new folder")
    return summary


def _deciding(about: dict[str, Any]) -> dict[str, Any]:
    """What two calls must have in common, by name, their model's files aside."""
    settings = {n: value for n, value in flat(about["settings"]) if n.startswith(MEASURED)}
    rewards = dict(flat({"reward": about.get("reward", {})}))
    return settings | rewards | {"prompts": about["prompts"]}


def _digest_of(prompts: Sequence[Prompt]) -> str:
    """Of what the prompts' rows say, in their order."""
    return hashlib.sha256(" ".join(map(prompt_id, prompts)).encode()).hexdigest()[:16]

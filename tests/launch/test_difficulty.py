"""`mrl difficulty`: what it refuses before an engine starts, a survey that goes on where it was ended, and a real measurement."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.load import load
from mrl.config.root import Config
from mrl.config.sections.data import DifficultySection
from mrl.data.difficulty import RateFile
from mrl.errors import ConfigError, RewardError
from mrl.launch.commands.difficulty import Survey, measure_difficulty, reward_digest
from mrl.launch.commands.digests import model_digest
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Sample, Status, Verdict, VerdictKind
from tests.launch.command import run
from tests.launch.tiny_runs import words
from tests.mrl.data.conftest import make_tokenizer

GSM8K = Path(__file__).parents[2] / "configs" / "gsm8k.yaml"
SAMPLING = Sampling(num_samples=16, temperature=1.0, max_tokens=4, seed=0)


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    make_tokenizer().save_pretrained(str(tmp_path / "model"))
    row = {"question": "1+1?", "answer": "#### 2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return [
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/rows.jsonl",
        f"data.validation={tmp_path}/rows.jsonl",
    ]


def test_bad_settings_end_it_before_an_engine_starts(settings: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.difficulty\.file is not set"):
        measure_difficulty(load([GSM8K], settings))
    (tmp_path / "rates.jsonl").write_text('{"about": {"model": "another"}}\n')
    with pytest.raises(ConfigError, match="was measured with model = another, this configuration has"):
        measure_difficulty(load([GSM8K], [*settings, f"data.difficulty.file={tmp_path}/rates.jsonl"]))


def about_of(config: Config) -> dict[str, Any]:
    """Return what the first line of a file says of its samples, without stops and reward."""
    drawn = dataclasses.asdict(Sampling.of(config))
    about = {n: drawn[n] for n in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")}
    return about | {"model": model_digest(config.model.path), "samples": 16}


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_file_of_responses_that_ended_elsewhere_is_refused(settings, tmp_path, name, saved) -> None:
    """Measured with the stop that the configuration lacks, and the other way round."""
    config = load([GSM8K], settings)
    about = about_of(config) | ({name: [3]} if saved else {})
    (tmp_path / "rates.jsonl").write_text(json.dumps({"about": about}) + "\n")
    more = [f"data.difficulty.file={tmp_path}/rates.jsonl"] + ([] if saved else [f"rollout.{name}=['3']"])
    with pytest.raises(ConfigError, match=f"was measured with {name} = "):
        measure_difficulty(load([GSM8K], [*settings, *more]))


def test_a_file_measured_with_another_reward_is_refused(settings: list[str], tmp_path: Path) -> None:
    config = load([GSM8K], settings)
    about = about_of(config) | {"reward": "another"}
    (tmp_path / "rates.jsonl").write_text(json.dumps({"about": about}) + "\n")
    with pytest.raises(ConfigError, match="was measured with reward = another"):
        measure_difficulty(load([GSM8K], [*settings, f"data.difficulty.file={tmp_path}/rates.jsonl"]))


def test_a_digest_of_rewards_changes_with_what_decides_them_alone() -> None:
    words = "reward={kind: null, parts: [{kind: maths, weight: 1.0}, {kind: format, weight: 0.5}]}"
    one = reward_digest(load([GSM8K], [words]).reward)
    assert reward_digest(load([GSM8K], [words, "reward.workers=7"]).reward) == one
    others = [
        words.replace("0.5", "0.25"),
        words.replace("{kind: maths", "{kind: maths, min_reward: -1.0"),
        "reward={kind: maths, parts: []}",
    ]
    assert len({one, *(reward_digest(load([GSM8K], [other]).reward) for other in others)}) == 4


def test_a_digest_of_rewards_is_of_what_files_hold(tmp_path: Path) -> None:
    def digest(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        own = f"{{kind: llm, parts: [], path: 'http://localhost:1', llm: {{template: {tmp_path}/{name}}}}}"
        return reward_digest(load([GSM8K], [f"reward={own}"]).reward)

    asked = "{prompt} {response} {reference}"
    first = digest("a.txt", asked)
    assert digest("b.txt", asked) == first != digest("a.txt", f"{asked}?")


@pytest.mark.parametrize("where", ["file", "module"])
def test_a_digest_of_a_plug_in_is_of_what_its_file_holds(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(folder: str, value: float) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "scores.py").write_text(f"def score(request):\n    return {value}\n")
        path = f"{tmp_path}/{folder}/scores.py" if where == "file" else f"{folder}.scores"
        return reward_digest(
            load([GSM8K], [f"reward={{kind: plugin, parts: [], path: '{path}:score'}}"]).reward
        )

    monkeypatch.chdir(tmp_path)
    first = digest("first", 1.0)
    assert digest("second", 1.0) == first != digest("second", 0.0)


class Coins:
    """Groups of prompts that are solved with known rates, by coins that a prompt's index alone seeds."""

    def __init__(self, rates: list[float], *, most: int = 1 << 20, judged: bool = True) -> None:
        """Ended after `most` groups."""
        self.rates, self.most, self.judged, self.seen = rates, most, judged, 0

    def generate_in_order(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[Group]:
        for prompt in prompts:
            if self.seen == self.most:
                raise KeyboardInterrupt
            self.seen += 1
            yield Group(prompt, tuple(self._sample(prompt, n) for n in range(sampling.num_samples)))

    def _sample(self, prompt: Prompt, number: int) -> Sample:
        coin = np.random.default_rng([prompt.index, number]).random()
        right = float(coin < self.rates[int(prompt.text)])
        verdict = (
            Verdict(VerdictKind.SCORED, right)
            if self.judged
            else Verdict(VerdictKind.NO_REWARD, None, reason="the judge is down")
        )
        one, ones = np.ones(1, np.int32), np.ones(1, np.float32)
        return Sample(
            prompt.index, number, prompt.tokens, one, one > 0, ones, one, Status.FINISHED, verdict=verdict
        )


def prompts(count: int) -> list[Prompt]:
    return [Prompt(n, np.array([n], np.int32), str(n), "7", row=f"rows.jsonl:{n + 1}") for n in range(count)]


def survey(path: Path, count: int, **about: Any) -> Survey:
    file = RateFile.read(path) if path.exists() else RateFile(about, {})
    return Survey(
        prompts(count), file, DifficultySection(file=str(path)), SAMPLING, RewardSection(kind="maths")
    )


def test_an_ended_survey_goes_on_and_ends_with_the_same_figures(tmp_path: Path) -> None:
    rates = [0.0, 0.5, 1.0, 0.3] * 100
    whole, ended = tmp_path / "whole.jsonl", tmp_path / "ended.jsonl"
    survey(whole, 400).run(Coins(rates))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        survey(ended, 400).run(Coins(rates, most=300))  # type: ignore[arg-type]
    assert len(RateFile.read(ended).prompts) == 256
    with ended.open("a") as file:
        file.write('{"id": "cut')
    survey(ended, 400).run(rest := Coins(rates))  # type: ignore[arg-type]
    assert rest.seen == 144, "samples would be drawn twice"
    found, expected = RateFile.read(ended).prompts, RateFile.read(whole).prompts
    assert found == expected and len(found) == 400
    places = [rate.band(DifficultySection(file="")) for rate in found.values()]
    assert places.count("below") >= 100 and places.count("above") >= 100
    assert not survey(ended, 400).waiting()


def test_rates_without_any_reward_are_not_written_down(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"none of 48 samples has a reward.*: the judge is down"):
        survey(tmp_path / "rates.jsonl", 3).run(Coins([0.5] * 3, judged=False))  # type: ignore[arg-type]
    assert RateFile.read(tmp_path / "rates.jsonl").prompts == {}


@pytest.mark.integration
def test_rates_of_a_real_engine_choose_the_rows_of_a_run(task: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(answer)} for n, answer in enumerate([0, 1, 2] * 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (
        f"reward={{kind: plugin, style: verl, path: {Path(__file__).parent}/rewards.py:by_answer}}",
        f"data.train={tmp_path}/rows.jsonl",
        f"data.difficulty.file={tmp_path}/rates.jsonl",
    )
    config = words(task, tmp_path, "rates", *more)
    said = run("difficulty", *config, log=tmp_path / "log")
    assert "12 prompts: 4 within 0.1 to 0.9, 4 below, 4 above" in said, said[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "rates.jsonl").read_text().splitlines()][1:]
    assert [line["place"] for line in lines] == ["below", "above", "inside"] * 4
    assert {line["samples"] for line in lines} == {16}
    again = run("difficulty", *config, log=tmp_path / "again.log", seconds=120)
    assert again.splitlines()[-1] == said.splitlines()[-1]
    shown = run("data", *config, log=tmp_path / "data.log", seconds=120)
    assert "left out by data.difficulty: 8 of domain default" in shown and "rows: 4," in shown

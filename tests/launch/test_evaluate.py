"""`mrl eval` before its engine starts, and the ends of its responses."""

import contextlib
import hashlib
import json
import re
import shutil
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mrl.config.load import load
from mrl.data.difficulty import read_rates
from mrl.data.load_rows import load_data
from mrl.errors import ConfigError
from mrl.files import output_lock
from mrl.launch.commands import evaluate as evaluating
from mrl.launch.commands.digests import model_digest
from mrl.launch.commands.evaluate import evaluate
from mrl.rollout.request import Sampling
from mrl.samples import Group, Prompt, Sample
from mrl.tokenizer_folder import load_tokenizer
from tests.launch import acting_runs
from tests.launch.command import run
from tests.launch.greedy_samples import compared
from tests.launch.tiny_runs import words
from tests.mrl.data.conftest import make_tokenizer
from tests.support.samples import make_sample, verdict_of
from tests.tiny_models import write_model

GSM8K = Path(__file__).parents[2] / "configs" / "gsm8k.yaml"


def _no_engine(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_rows_that_are_left_out_are_counted_where_people_see_it(tmp_path, capsys, monkeypatch) -> None:
    make_tokenizer().save_pretrained(str(tmp_path / "model"))
    (tmp_path / "rows.jsonl").write_text(
        2 * (json.dumps({"question": "1+1?", "answer": "#### 2", "page": 3}) + "\n")
    )
    words = [f"model.path={tmp_path}/model", f"data.validation={tmp_path}/rows.jsonl"]
    monkeypatch.setattr("mrl.launch.commands.evaluate.one_engine", _no_engine)
    with pytest.raises(KeyboardInterrupt):
        evaluate(load([GSM8K], words))
    assert "data: rows: 0, validation_rows: 1, duplicates: 1, " in capsys.readouterr().err


class Counting:
    """Gives each sample a different score and stops after `most` groups."""

    def __init__(self, *, most: int = 100) -> None:
        self.asked: list[tuple[int, int]] = []
        self._most = most

    def generate_in_order(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Group]:
        for prompt in prompts:
            if len(self.asked) == self._most:
                raise KeyboardInterrupt
            self.asked.append((prompt.index, sampling.num_samples))
            samples = [self._sample(prompt, number) for number in range(sampling.num_samples)]
            yield Group(prompt, tuple(samples))

    def _sample(self, prompt: Prompt, number: int) -> Sample:
        score = None if (prompt.index, number) == (-2, 1) else 1.0 / (number - prompt.index)
        return make_sample(0, number, prompt_index=prompt.index, verdict=verdict_of(score))


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counting]:
    """Return a function that measures five rows, greedily and in three samples, into tmp_path/out."""
    make_tokenizer().save_pretrained(str(tmp_path / "model"))
    rows = [json.dumps({"question": f"{n}+1?", "answer": f"#### {n + 1}"}) for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    settings = [f"model.path={tmp_path}/model", f"data.validation={tmp_path}/rows.jsonl"]

    def measure(*extra: str, most: int = 100, train: bool = False) -> Counting:
        model = Counting(most=most)
        monkeypatch.setattr(evaluating, "one_engine", lambda *_, **__: contextlib.nullcontext(model))
        config = load([GSM8K], [*settings, "loop.validation={num_prompts: 5, num_samples: 3}", *extra])
        evaluate(config, out=f"{tmp_path}/out", train=train)
        return model

    return measure


def test_a_measurement_says_how_far_it_is(measuring, monkeypatch, capsys) -> None:
    monkeypatch.setattr(evaluating, "SECONDS_BETWEEN", 0.0)
    measuring()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eval: ")]
    of_kinds = [
        re.escape(line)
        for kind in ("validation", "sampled")
        for line in (
            *(f"eval: {n} of 5 prompts ({kind})" for n in range(1, 6)),
            f"eval: all 5 prompts ({kind}) in ",
        )
    ]
    expected = [
        "eval: CPU run: engines in float32, eager engines",
        "eval: starting the engine, for 5 prompts",
        r"eval: the engine is up after \d+ s",
        *of_kinds,
    ]
    assert all(re.match(*pair) for pair in zip(expected, lines, strict=True)), lines


def test_samples_are_written_as_they_are_judged_and_the_summary_at_the_end(measuring, tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        measuring(most=7)
    assert "metrics" not in json.loads((out / "summary.json").read_text())
    begun = (out / "samples.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="exists and is not empty; choose a new folder"):
        measuring()
    assert (out / "samples.jsonl").read_bytes() == begun
    shutil.rmtree(out)
    model = measuring()
    assert model.asked == [(-1 - n, size) for size in (1, 3) for n in range(5)]
    assert len(begun.splitlines()) == 11 and (out / "samples.jsonl").read_bytes().startswith(begun)
    assert json.loads((out / "summary.json").read_text())["metrics"]["val/reward"] > 0.4


def test_a_run_takes_the_rows_whose_solve_rates_were_measured(measuring, tmp_path) -> None:
    """Only the first sampled response of the first row scores 1."""
    rows = f"data.train={tmp_path}/rows.jsonl"
    with pytest.raises(ConfigError, match=r"loop\.validation\.num_samples is 0: .*; set it, e\.g\. to 16"):
        measuring(rows, "loop.validation.num_samples=0", train=True)
    chosen = f"data.difficulty.file={tmp_path}/out/rates.jsonl"
    measuring(rows, chosen, "loop.validation.num_prompts=1", train=True)
    rates = list(read_rates(tmp_path / "out/rates.jsonl").values())
    assert rates == [(3, 1), (2, 0), (3, 0), (3, 0), (3, 0)], "rates of every row, of samples with a reward"
    tokenizer = load_tokenizer(tmp_path / "model")
    config = load([GSM8K], [f"model.path={tmp_path}/model", rows, chosen, "data.validation=null"])
    assert [part.rows[0].text for part in load_data(config.data, config.reward, tokenizer).train] == ["0+1?"]


@pytest.mark.integration
def test_rates_of_a_real_engine_choose_the_rows_of_a_run(task: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(answer)} for n, answer in enumerate([0, 1, 2] * 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = words(
        *(task, tmp_path, "rates", f"data.train={tmp_path}/rows.jsonl", "loop.validation.num_samples=16"),
        f"reward={{kind: plugin, style: verl, path: {Path(__file__).parent}/rewards.py:by_answer}}",
    )
    run("eval", *config, "--train", "--out", f"{tmp_path}/out", log=tmp_path / "log")
    chosen = f"data.difficulty.file={tmp_path}/out/rates.jsonl"
    shown = run("data", *config, chosen, log=tmp_path / "data.log", seconds=120)
    assert "left out by data.difficulty: 8 of domain default" in shown and "rows: 4," in shown


def test_two_measurements_do_not_write_into_one_folder(measuring, tmp_path) -> None:
    with (
        output_lock(tmp_path / "out", "--out"),
        pytest.raises(ConfigError, match=r"--out .*/out is in use by host .* pid"),
    ):
        measuring()
    measuring()
    assert not (tmp_path / "out.lock").exists()


def test_a_models_digest_is_of_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    """Hash so many files that threads finish out of order; earlier digests stay valid."""
    contents = {f"{n:02d}.bin": bytes([n]) * (1 << (20 - n)) for n in range(20)}
    for name in reversed(contents):
        (tmp_path / name).write_bytes(contents[name])
    files = {name: [len(data), hashlib.sha256(data).hexdigest()] for name, data in contents.items()}
    expected = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    assert model_digest(str(tmp_path)) == expected


@pytest.mark.integration
def test_stop_texts_and_the_tokens_of_the_generation_config_end_each_turn(acting, tmp_path) -> None:
    """Stop letters stay in a turn's text; the end token does not. A third of tokens end a turn."""
    pieces = "".join(AutoTokenizer.from_pretrained(acting / "model").get_vocab())
    letters = [letter for letter in string.ascii_letters if pieces.count(letter) == 1]
    stops = f"rollout.stop=[{','.join(letters)}]"
    arguments = acting_runs.words(acting, tmp_path, "eval", stops, "loop.validation.num_samples=4")
    run("eval", *arguments, "--out", f"{tmp_path}/out", log=tmp_path / "log")
    samples = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    texts = [turn["said"] for sample in samples for turn in sample["turns"]]
    by_text = [text for text in texts if text and text[-1] in letters]
    assert len(letters) > 10 and len(by_text) > 4 and len(texts) - len(by_text) > 10
    assert not any(letter in text[:-1] for text in texts for letter in letters)
    assert sum(sample["status"] == "finished" for sample in samples) > 0.8 * len(samples), "others were cut"


def test_a_stop_that_can_end_nothing_is_refused(task: Path) -> None:
    base = [f"model.path={task}/model", f"data.validation={task}/validation.jsonl", "rollout.stop=['<end>']"]
    base += ["model.max_length=32", "data.max_prompt_tokens=16", "rollout.max_response_tokens=8"]
    with pytest.raises(ConfigError, match="contains the special token '<end>'"):
        evaluate(load([GSM8K.with_name("quickstart.yaml")], base))


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_a_folder_is_evaluated_as_it_is(family: str, task: Path, tmp_path: Path) -> None:
    """Greedy responses equal transformers' except at near-ties (image folders, sliding windows)."""
    tokenizer, model = load_tokenizer(str(task / "model")), tmp_path / "model"
    size = -(-len(tokenizer) // 16) * 16
    write_model(model, family, served=True, vocab_size=size, eos_token_id=tokenizer.eos_token_id)
    for file in (task / "model").glob("tokenizer*"):
        shutil.copy(file, model)
    arguments = words(task, tmp_path, "eval", f"model.path={model}", "loop.validation.num_prompts=24")
    run("eval", *arguments, "--out", f"{tmp_path}/out", log=tmp_path / "log")
    assert compared(tmp_path / "out/samples.jsonl", tokenizer, model, torn=1e-3) > 12

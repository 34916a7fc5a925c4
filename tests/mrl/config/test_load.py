"""Merging, resolving, and errors with a place, a reason and a way out."""

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from mrl import cli
from mrl.algorithms.advantages import ESTIMATORS, Rollouts, estimate_advantages
from mrl.algorithms.tokens import Segments
from mrl.capacity.requirements import prompts_and_responses
from mrl.config.describe import describe, section_types, tag_of
from mrl.config.load import dump, load, load_config, load_tune, split_arguments
from mrl.config.other_names import former_settings, words_of_others
from mrl.config.root import Config
from mrl.config.sections.algorithm import EstimatorSection
from mrl.errors import ConfigError
from mrl.files import CONFIGS
from mrl.loops.validate import validation_sampling_of
from mrl.rollout.request import Sampling
from mrl.section import Section
from tests.support.recipes import files_of

MINIMAL = """
run: {name: r}
model: {path: m}
data: {train: t.jsonl}
reward: {kind: maths}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path


def test_files_merge_left_to_right_then_words(minimal: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.yaml"
    second.write_text("loop: {steps: 7, prompts_per_step: 3}\ntraining: {optimizer: {lr: 1e-6}}\n")
    config = load(
        [minimal, second],
        ["loop.steps=9", "training.layout.ep=2", "training.layout.dp=2", "model.reference_path=null"],
    )
    assert (config.loop.steps, config.loop.prompts_per_step) == (9, 3)
    assert config.training.optimizer.lr == 1e-6
    assert config.training.layout.world_size == 2 and config.num_engines == 2
    assert config.model.reference_path is None


def test_a_section_set_to_null_keeps_nothing_of_the_files(minimal: Path) -> None:
    file = {"algorithm": {"distillation": {"teachers": {"chat": "a"}, "coefficient": 3.0}}}
    for cleared in ("algorithm={distillation: null}", "algorithm.distillation=null"):
        config = load([minimal, file], [cleared, "algorithm.distillation.teachers={sums: b}"])
        distillation = config.algorithm.distillation
        assert distillation is not None
        assert distillation.teachers == {"sums": "b"} and distillation.coefficient == 1.0


def test_mappings_words_and_files_are_one_configuration(minimal: Path) -> None:
    config = load_config({"run": {"name": "own"}}, "loop.steps=9", str(minimal), {"loop": {"steps": 7}})
    assert (config.run.name, config.loop.steps) == ("r", 9)
    assert config == load([{"run": {"name": "own"}}, minimal], ["loop.steps=9"])
    again = load_config(config.model_dump(), {"algorithm": {"loss": {"name": "gspo"}}})
    assert again.algorithm.loss.clip_low == 3e-4, "another choice brings its own bounds"
    with pytest.raises(ConfigError, match=r"loop.stepz: unknown key \(mapping 2\); did you mean 'steps'"):
        load_config(minimal, {"loop": {"stepz": 7}})


def test_another_loss_brings_its_own_bounds(minimal: Path, tmp_path: Path) -> None:
    clip = tmp_path / "clip.yaml"
    clip.write_text("algorithm: {loss: {clip_low: 0.1, clip_high: 0.28}}\n")
    kept = load([minimal, clip], ["algorithm.loss.name=ppo_clip"]).algorithm.loss
    assert (kept.name, kept.clip_low, kept.clip_high) == ("ppo_clip", 0.1, 0.28)
    papers = load([minimal, clip], ["algorithm.loss.name=gspo"]).algorithm.loss
    assert (papers.name, papers.clip_low, papers.clip_high) == ("gspo", 3e-4, 4e-4)
    loss = load([minimal, clip], ["algorithm.loss.clip_high=5e-4", "algorithm.loss.name=gspo"]).algorithm.loss
    assert (loss.clip_low, loss.clip_high) == (3e-4, 5e-4)
    with pytest.raises(ConfigError, match="unknown key"):
        load([minimal, clip], ["algorithm.loss.name=reinforce", "algorithm.loss.clip_high=0.2"])


def test_another_correction_brings_its_own_bounds(minimal: Path, tmp_path: Path) -> None:
    tis = tmp_path / "tis.yaml"
    tis.write_text("algorithm: {correction: {kind: truncated, high: 3.0}}\n")
    kept = load([minimal, tis], ["algorithm.correction.kind=truncated"]).algorithm.correction
    assert kept.model_dump() == {"kind": "truncated", "high": 3.0}
    papers = load([minimal, tis], ["algorithm.correction.kind=icepop"]).algorithm.correction
    assert papers.model_dump() == {"kind": "icepop", "low": 0.5, "high": 5.0}
    with pytest.raises(ConfigError, match=r"token_weights: unknown key.*known keys here: kind, high"):
        load([minimal, tis], ["algorithm.correction.token_weights=raw"])


def test_schedules_counted_in_steps_follow_epochs_and_minibatches(minimal: Path) -> None:
    """Minibatches are whole groups, so few prompts make few of them; the critic follows the same rule."""
    words = ["algorithm={estimator: {name: gae}, epochs: 2, minibatches: 8}", "loop.prompts_per_step=16"]
    words += ["training.optimizer={schedule_unit: steps, warmup_steps: 3, schedule: linear, decay_steps: 50}"]
    config = load(
        [minimal], [*words, "critic.optimizer={schedule_unit: steps, warmup_steps: 5}"]
    ).in_updates()
    assert (config.training.optimizer.warmup_steps, config.training.optimizer.decay_steps) == (48, 800)
    assert config.critic is not None
    assert (config.critic.optimizer.warmup_steps, config.critic.optimizer.decay_steps) == (80, None)
    few = load([minimal], [*words, "critic={}", "loop.prompts_per_step=4"]).in_updates()
    assert few.training.optimizer.warmup_steps == 3 * 2 * 4
    updates = load([minimal], ["training.optimizer.warmup_steps=3", "algorithm.minibatches=8"])
    assert updates.in_updates() == updates


def test_the_resolved_configuration_loads_back_equal(minimal: Path, tmp_path: Path) -> None:
    """The file stays readable: non-ASCII letters are not escaped."""
    config = load([minimal], ["loop.steps=3", "run.folder=größere Probe"])
    again = tmp_path / "resolved.yaml"
    again.write_text(dump(config), encoding="utf-8")
    assert load([again]) == config and "folder: größere Probe\n" in dump(config)


def test_an_unknown_key_names_place_and_nearest(minimal: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("training:\n  optimizer:\n    learning_rate: 1\n  microbatch_token: 5\n")
    with pytest.raises(ConfigError) as error:
        load([minimal, wrong])
    text = str(error.value)
    assert "training.microbatch_token: unknown key" in text and "did you mean 'microbatch_tokens'" in text
    assert "wrong.yaml:4" in text and "training.optimizer.learning_rate" in text and "wrong.yaml:3" in text


def test_a_chosen_section_is_told_by_path_and_origin(minimal: Path) -> None:
    """The path is the one that users write, without the chosen name."""
    words = ["algorithm.loss={name: gspo, clip_lo: 1}", "algorithm.correction={kind: icepop, low: -1}"]
    with pytest.raises(ConfigError) as error:
        load([minimal], words)
    loss, correction = str(error.value).splitlines()
    assert loss.startswith(f"algorithm.loss.clip_lo: unknown key (command line ({words[0]})); did you mean")
    assert correction.startswith("algorithm.correction.low: ") and correction.endswith(f"({words[1]}))")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["training.layout.ep=2"], "must divide"),
        (["training.layout.vpp=2"], "vpp = 2 needs pp"),
        (["training.layout.dp=3", "rollout.tp=2"], "rollout.tp = 2 does not divide the training world of 3"),
        (["training.layout.dp=3", "rollout.tp=2", "launch.engine_slots=5"],
         "rollout.tp = 2 does not divide launch.engine_slots = 5"),
        (["training.layout.dp=6", "rollout={dp: 2, tp: 2, expert_parallel: true}"],
         "rollout.dp x tp = 4 does not divide the training world of 6"),
        (["training.layout.dp=2", "rollout.dp=2"], "rollout.dp = 2 needs rollout.expert_parallel = true"),
        (
            [
                "training.layout.dp=2",
                "rollout={dp: 2, expert_parallel: true, engine_args: {async_scheduling: true}}",
            ],
            "rollout.engine_args.async_scheduling with rollout.dp = 2",
        ),
        (["launch.engine_slots=1", "training.offload=always"],
         "training.offload = always with launch.engine_slots = 1: .* set training.offload to auto or never"),
        (["rollout.max_response_tokens=512", "model.max_length=512"], "leaves no room for a prompt"),
        (["rollout.max_num_batched_tokens=64", "rollout.max_num_seqs=65"],
         "at least rollout.max_num_seqs = 65"),
        (["rollout.stop=[a,'']"], "an empty text"),
        (["loop.steps=many"], "loop.steps"),
        (["loop.steps"], "neither a configuration file nor"),
        (["training.optimizer.schedule=cosine"], "needs optimizer.decay_steps"),
        (["launch.profile={steps: [1], ranks: [0, 8]}"],
         r"profile\.ranks contains \[8\], but trainer ranks are 0 to 0"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_before_anything_starts(minimal, words, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        load([minimal], words)


def test_validation_samples_as_training_does_where_it_says_nothing_else(minimal: Path) -> None:
    config = load([minimal], ["rollout.top_p=0.9", "rollout.top_k=50", "loop.validation.num_samples=4"])
    assert validation_sampling_of(config) == dataclasses.replace(Sampling.of(config), num_samples=4)
    words = ["loop.validation.temperature=0.6", "loop.validation.top_p=0.95", "loop.validation.top_k=0"]
    sampling = validation_sampling_of(load([minimal], ["rollout.top_k=50", *words]))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.95, 0, 0.0)


def test_a_missing_required_key_and_an_absent_file_are_named(tmp_path: Path, minimal: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("run: {name: r}\n")
    with pytest.raises(ConfigError, match=r"model: required"):
        load([empty])
    with pytest.raises(ConfigError, match=r"absent\.yaml does not exist"):
        load([minimal, tmp_path / "absent.yaml"])


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    twice = tmp_path / "twice.yaml"
    twice.write_text("run:\n  name: a\n  name: b\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml:3.*duplicate key"):
        load([twice])


def test_arguments_split_into_files_and_words() -> None:
    assert split_arguments(["a.yaml", "x.y=1", "./odd=name.yaml"]) == (
        ["a.yaml", "./odd=name.yaml"],
        ["x.y=1"],
    )


def test_every_setting_has_a_sentence_once() -> None:
    lines = describe().splitlines()
    assert len(lines) > 200 and len(set(lines)) == len(lines)
    assert [line for line in lines if line.rstrip().endswith("#")] == []
    assert sum("seconds of CPU time" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("reward.kind", "reward.kind: maths | code | instructions"),
        ("rollout.dtype", "rollout.dtype: auto | bfloat16 | float32 = auto  #"),
        ("rollout.tp", "rollout.tp: int = 1  #"),
        ("algorithm.loss", "algorithm.loss[gspo].clip_low: float = 0.0003"),
        ("algorithm.loss.clip_low", "algorithm.loss[gspo].clip_low: float = 0.0003"),
        ("reward.domains.maths", "reward.domains.maths.on_conflict: wrong | last = wrong"),
    ],
)
def test_settings_are_shown_by_path_with_type_and_choices(path: str, expected: str) -> None:
    lines = describe(path).splitlines()
    assert any(line.startswith(expected) for line in lines), lines
    assert all(re.sub(r"\[\w+\]", "", line).startswith(path) for line in lines)


EVERY_SECTION = [
    "data={difficulty: {file: f}, train: [{path: t}]}",
    "reward={domains: {a: {parts: [{kind: maths}]}, b: {kind: llm, engine: e}}, engines: {e: {model: m}}}",
    "agent={environment: calculator, domains: {a: {environment: tests.support.guess:Guess}}}",
    "algorithm={estimator: {name: gae}, shaping: {overlong: {max_tokens: 9, buffer_tokens: 1}}}",
    "algorithm={shaping_by_domain: {a: {}}, filter: {}}", "critic={}", "training.lora={}", "model.new={}",
    "tune={data: {train: [{path: t}]}, output: o}",
]  # fmt: skip
"""Every section that is absent by default, with its required settings only."""


def resolved(value: object, annotation: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield (path, value) of every setting of a resolved section, with the paths of `mrl settings`."""
    sections = section_types(annotation)
    if isinstance(value, Section):
        path = f"{path}[{tag_of(type(value))}]" if len(sections) > 1 else path
        for name, field in type(value).model_fields.items():
            yield from resolved(getattr(value, name), field.annotation, f"{path}.{name}".lstrip("."))
    elif sections and isinstance(value, dict | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from resolved(inner, annotation, path)
    elif not sections and get_args(annotation) != (value,):  # the discriminator of a chosen section
        yield path, value


def test_every_printed_default_is_that_of_a_resolved_configuration(minimal: Path) -> None:
    """This also covers sections that are used in several places."""
    given, compared = "\n".join([MINIMAL, *EVERY_SECTION]), set()
    below = functools.cache(
        lambda prefix: {line.partition(": ")[0]: line for line in describe(prefix).splitlines()}
    )
    for path, value in resolved(load([minimal], EVERY_SECTION), Config, ""):
        section, _, name = path.rpartition(".")
        line = below(section)[path]
        if line.partition("  # ")[0].endswith("(required)") or f"{name}: " in given:
            continue
        shown = {"None": "null", "True": "true", "False": "false", "": "''", "\n": r"'\n'"}.get(
            str(value), value
        )
        assert f" = {list(shown) if isinstance(shown, tuple) else shown}  # " in line, (line, value)
        assert below("").get(path, line) == line, "the whole list says the same"
        compared.add(path)
    again = {"tune.optimizer.lr", "critic.optimizer.lr", "reward.domains.parts.concurrency", "reward.workers"}
    assert again <= compared and len(compared) > 300


def test_a_section_that_is_given_in_part_has_the_defaults_of_the_whole(minimal: Path) -> None:
    settings = ["critic={}", "algorithm.estimator.name=gae", "tune={data: {train: t}, output: o}"]
    whole = load([minimal], settings)

    def sections(section: Section, path: str) -> Iterator[str]:
        for name in type(section).model_fields:
            if isinstance(inner := getattr(section, name), Section):
                yield f"{path}{name}"
                yield from sections(inner, f"{path}{name}.")

    empty = {path: load([minimal], [*settings, f"{path}={{}}"]) for path in sections(whole, "")}
    assert {"critic.optimizer", "tune.optimizer", "training.optimizer"} <= empty.keys()
    assert [path for path, config in empty.items() if config != whole] == []


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_estimators_that_compare_samples_refuse_to_be_given_one(minimal: Path, name: str) -> None:
    """Exactly the estimators that give a prompt's only sample no advantage refuse."""
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.25, 2.0, 0.0])
    alone = Rollouts.of(
        token_rewards=rewards,
        mask=torch.ones(6, dtype=torch.bool),
        segments=Segments(torch.tensor([0, 0, 1, 1, 2, 2]), 3),
        group_ids=torch.arange(3),
        values=torch.zeros(6),
        outcomes=torch.tensor([1.0, 0.0, 0.5]),
    )
    advantages, _ = estimate_advantages(EstimatorSection.model_validate({"name": name}), alone)
    settings = [f"algorithm.estimator.name={name}", *(["critic={}"] if name == "gae" else [])]
    load([minimal], [*settings, "loop.samples_per_prompt=2"])
    if advantages.any():
        load([minimal], [*settings, "loop.samples_per_prompt=1"])
        return
    with pytest.raises(ConfigError, match=r"samples_per_prompt = 1 with .* set loop.samples_per_prompt to 2"):
        load([minimal], [*settings, "loop.samples_per_prompt=1"])
    load(
        [minimal], [*settings, "loop.samples_per_prompt=1", "algorithm.distillation={teachers: {default: t}}"]
    )


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ([], 1e-5),
        (["tune.optimizer.warmup_steps=3"], 1e-5),
        (["tune.objective.name=dpo"], 1e-6),
        (["tune.objective.name=kto", "tune.optimizer={schedule: cosine, decay_steps: 9}"], 1e-6),
        (["tune.objective.name=reward_model"], 1e-5),
        (["tune.objective.name=dpo", "tune.optimizer.lr=1e-4"], 1e-4),
        (["tune.objective.name=dpo", "training.optimizer.lr=1e-4"], 1e-6),
    ],
)
def test_tuning_has_the_usual_rate_of_its_objective(minimal: Path, settings: list[str], rate: float) -> None:
    config = load([minimal], ["tune={data: {train: t}, output: o}", *settings])
    assert config.tune is not None and config.tune.optimizer.lr == rate
    assert load_config(config.model_dump()) == config


def test_a_reward_model_has_no_draft_head_to_train(minimal: Path) -> None:
    trained = ["tune={data: {train: t}, output: o}", "training.drafts=trained"]
    load([minimal], [*trained, "tune.objective.name=dpo"])
    with pytest.raises(
        ConfigError, match=r"training\.drafts = trained with tune\.objective\.name = reward_model"
    ):
        load([minimal], [*trained, "tune.objective.name=reward_model"])


def test_a_path_without_settings_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"there is no setting rollout\.tpp; did you mean 'rollout\.tp'"):
        describe("rollout.tpp")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("algorithm.lora.rank=8", "algorithm.lora.rank: unknown key .*; did you mean training.lora"),
        ("training.optimizer.learning_rate=1", r"did you mean training\.optimizer\.lr\?"),
        ("loop.old_logprobs=auto", r"did you mean 'algorithm\.old_logprobs'\?"),
        ("training.tp=2", r"did you mean .*'training\.layout\.tp' or 'rollout\.tp'\?"),
    ],
)
def test_words_of_other_systems_are_answered(minimal: Path, word: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load([minimal], [word])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("lora", r"training\.lora\.rank"), ("lr", r"'training\.optimizer\.lr'"),
        ("rollout.n", r"loop\.samples_per_prompt"), ("judge", "judge is renamed to reward"),
        ("loop.old_logprobs", r"did you mean 'algorithm\.old_logprobs'"),
        ("clip_low", r"did you mean 'algorithm\.loss\.clip_low'\?"),
        ("deepspeed", r"deepspeed is not supported: training\.layout"),
        ("val/accuracy", "the metric is renamed to val/reward"),
    ],
)  # fmt: skip
def test_settings_answers_words_of_other_systems_and_last_names(word: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        describe(word)


def test_words_of_other_systems_lead_to_settings_that_are_there() -> None:
    known = [line.split(":")[0] for line in describe().splitlines()]
    plain = {re.sub(r"\[\w+\]", "", path) for path in known}
    same, unsupported = words_of_others()
    for advice in set(same.values()):
        assert all(describe(re.match(r"[\w.]+", setting)[0]) for setting in advice.split(", or ")), advice
    for advice in unsupported.values():
        assert re.findall(r"\b(?:training|launch|rollout|algorithm)\b[\w.]*", advice)[0] in plain, advice
    assert not unsupported.keys() & (same.keys() | {path.rpartition(".")[2] for path in plain})


TUNE = {
    "run": {"name": "r"},
    "model": {"path": "m"},
    "tune": {"data": {"train": "rows.jsonl"}, "output": "out"},
}


def test_tuning_needs_neither_prompts_nor_rewards() -> None:
    config, absent = load_tune(TUNE)
    assert absent == {"data", "reward"} and config.model.max_length == 1280
    assert [entry.path for entry in config.data.train_entries()] == ["rows.jsonl"], "a new tokenizer's texts"
    assert not {"data", "reward"} & yaml.safe_load(dump(config, without=absent)).keys()
    with pytest.raises(ConfigError, match=r"^data: required but not given\nreward: required but not given$"):
        load_config(TUNE)
    given = {"data": {"train": "t.jsonl"}, "reward": {"kind": "maths"}, "rollout": {"max_response_tokens": 9}}
    assert load_tune(TUNE, given) == (load_config(TUNE, given), frozenset())
    short, absent = load_tune(TUNE, "model.max_length=16")
    assert short.model.max_length == 16 and absent == {"data", "reward", "rollout"}


@pytest.mark.parametrize(
    ("tune", "message"),
    [
        ({"data": {"train": [{"path": 3}]}}, r"^tune\.data\.train"),
        ({"data": None}, r"^tune\.data: "),
        ({"output": None}, r"^tune\.output: "),
        ({"data": {"train": None}}, r"^tune\.data\.train"),
    ],
)
def test_a_mistake_in_the_rows_of_a_tuning_is_said_once(tune: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_tune(TUNE, {"tune": tune})
    assert all(line.startswith("tune.") for line in str(error.value).splitlines())


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ([], 1280),
        (["model.max_length=null"], 1280),
        (["data.max_prompt_tokens=100"], 356),
        (["data.max_prompt_tokens=100", "rollout.max_response_tokens=7"], 107),
        (["model.max_length=2000", "data.max_prompt_tokens=100"], 2000),
    ],
)
def test_the_longest_sequence_has_room_for_prompt_and_response(minimal, settings, longest) -> None:
    config = load([minimal], settings)
    assert config.model.max_length == longest and prompts_and_responses(config) == []
    assert load_config(config.model_dump()) == config


def test_every_word_in_the_page_of_other_systems_is_answered_with_ours(minimal: Path) -> None:
    same, unsupported = words_of_others()
    assert len(same) > 150 and {"rollout.n", "hf_checkpoint"} <= same.keys()
    for word, advice in (same | unsupported).items():
        with pytest.raises(ConfigError) as error:
            load([minimal], [f"{word}=1"])
        assert advice in str(error.value), word


def test_a_file_of_verl_is_answered_setting_by_setting_and_a_typing_error_by_its_section(minimal) -> None:
    tree = {"actor_rollout_ref": {"rollout": {"n": 8, "name": "sglang"}, "actor": {"ppo_epochs": 2}}}
    with pytest.raises(ConfigError) as error:
        load([minimal, tree])
    assert [line.partition(" (mapping 2)")[0] for line in str(error.value).splitlines()] == [
        f"actor_rollout_ref.{name}: unknown key" for name in ("rollout.n", "rollout.name", "actor.ppo_epochs")
    ]
    with pytest.raises(ConfigError, match=r"^traaining: unknown key .*; did you mean 'training'\?$"):
        load([minimal], ["traaining.optimizer.lr=1e-6"])


def test_a_run_of_an_earlier_release_is_read_without_its_removed_settings(minimal, tmp_path, caplog) -> None:
    config = load([minimal])
    tree = yaml.safe_load(dump(config))
    tree["algorithm"]["kl"]["controller"] = {"kind": "fixed"}
    tree["data"]["train"] = [{"path": "t.jsonl", "columns": {"tools": None}}]
    tree["reward"] = {"parts": [{"kind": "maths", "maths": {"percent": "ignore"}}]}
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match="the setting is removed"):
        load([run / "config.yaml"])
    (run / "metrics.jsonl").touch()
    assert load([run / "config.yaml"]).algorithm == config.algorithm
    for setting in (
        "algorithm.kl.controller = {'kind': 'fixed'}",
        "maths.percent = 'ignore'",
        "columns.tools = None",
    ):
        assert setting in caplog.text
    tree["loop"]["stepps"] = 3
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"loop\.stepps: unknown key"):
        load([run / "config.yaml"])


def places(
    section: type[Section], path: str = "", outer: Callable[[object], object] = lambda tree: tree
) -> Iterator[tuple[type[Section], str, Callable[[object], object]]]:
    """Yield (section, path, function that wraps settings into a full tree) of a section and all below."""
    yield section, path, outer
    for name, field in section.model_fields.items():
        is_map = typing.get_origin(field.annotation) is dict
        is_list = typing.get_origin(field.annotation) in (tuple, list) or str in get_args(field.annotation)
        for inner in section_types(field.annotation):
            tag = next((key for key in ("name", "kind") if tag_of(inner) and key in inner.model_fields), None)
            chosen = {} if tag is None else {tag: tag_of(inner)}

            def around(
                tree: dict,
                name: str = name,
                chosen: dict = chosen,
                is_map: bool = is_map,
                is_list: bool = is_list,
            ) -> object:
                entry = chosen | tree
                return outer({name: {"d": entry} if is_map else [entry] if is_list else entry})

            middle = ".d" if is_map else ".0" if is_list else ""
            yield from places(inner, f"{path}.{name}{middle}".removeprefix("."), around)


ALL_PLACES = sorted(places(Config), key=lambda place: place[1].count("."), reverse=True)
PLACES = {section.__name__: (section, path, around) for section, path, around in ALL_PLACES}


@pytest.mark.parametrize(("section_name", "old"), former_settings())
def test_a_former_setting_is_told_what_to_write_instead(minimal, section_name, old) -> None:
    """An old run's config.yaml gets the same message."""
    section, path, around = PLACES[section_name]
    setting, is_value, value = old.partition("=")
    field = section.model_fields.get(setting)
    if field is not None and section_types(field.annotation):
        value = {"name": value}
    elif field is not None and typing.get_origin(field.annotation) is tuple:
        value = [value]
    with pytest.raises(ConfigError) as error:
        load([minimal, around({setting: value if is_value else 1})])
    where = re.escape(f"{path}.{setting}".removeprefix(".")) + r"(\.0)?"
    message = re.escape(f"is {former_settings()[section_name, old]}")
    assert re.search(rf"^{where}: .* {message}( \(mapping 2\))?$", str(error.value), re.MULTILINE), str(
        error.value
    )


@pytest.mark.parametrize("old", cli.FORMER_COMMANDS)
def test_a_former_command_or_option_says_what_to_do(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *option = old.split()
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, *option, "a.yaml"])
    assert exit_.value.code == 2
    assert f"{old} is {cli.FORMER_COMMANDS[old]}" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_file_resolves(path: Path) -> None:
    assert isinstance(load(files_of(path.stem)), Config)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rollout.kv_cache_bytes=5", "greater than or equal to 1048576, or auto; got 5 "),
        ("rollout.kv_cache_bytes=much", "unable to parse string as an integer, or auto; got 'much' "),
        ("rollout.enforce_eager=maybe", "unable to interpret input, or auto; got 'maybe' "),
    ],
)
def test_a_value_that_is_neither_auto_nor_of_its_type_has_one_line(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load([CONFIGS / "quickstart.yaml"], [word])
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{word.partition('=')[0]}: ") and f"{message}(command line" in line


def test_the_quickstart_model_goes_over_the_quickstart() -> None:
    config = load([CONFIGS / "quickstart.yaml", CONFIGS / "quickstart_model.yaml"])
    assert config.model.new is not None and config.tune is not None
    assert config.tune.output == load([CONFIGS / "quickstart.yaml"]).model.path


def test_engines_on_slots_of_their_own_are_free_of_the_layout(minimal: Path) -> None:
    """With slots of their own, nobody sleeps or off-loads, and no slot's memory passes weights."""
    config = load([minimal], ["training.layout.dp=3", "rollout.tp=2", "launch.engine_slots=4"])
    assert (config.num_slots, config.engine_slots, config.num_engines) == (7, range(3, 7), 2)
    placed = config.as_placed(gpus=True, one_node=True)
    assert (placed.sync.transport, placed.training.offload) == ("distributed", "never")
    assert not placed.rollout.enable_sleep_mode and placed.launch == config.launch
    assert config.as_placed(gpus=False, one_node=True).sync.transport == "auto"
    assert config.as_placed(gpus=False, one_node=False).sync.transport == "distributed"
    nixl = load([minimal], ["launch.engine_slots=1", "sync.transport=nixl"])
    assert nixl.as_placed(gpus=False, one_node=True).sync.transport == "nixl"


STREAM = ("launch.engine_slots=1", "loop.schedule=stream", "stream.max_staleness=1")


@pytest.mark.parametrize(
    ("settings", "gpus", "one_node", "overlap"),
    [
        (STREAM, False, False, "on"),
        ((*STREAM, "sync.transport=distributed"), False, True, "on"),
        ((*STREAM, "sync.overlap=off"), False, False, "off"),
        (STREAM, False, True, "off"),
        (STREAM, True, False, "off"),
        ((*STREAM, "sync.overlap=on"), True, False, "on"),
        (("launch.engine_slots=1",), False, False, "off"),
    ],
)
def test_a_sync_overlaps_generation_if_messages_go_to_engines_that_generate(
    settings: tuple[str, ...], gpus: bool, one_node: bool, overlap: str, minimal: Path
) -> None:
    placed = load([minimal], settings).as_placed(gpus=gpus, one_node=one_node)
    assert placed.sync.overlap == overlap


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ((), "sync.overlap = on with engines on the trainer's slots; set launch.engine_slots"),
        (("launch.engine_slots=1",), "sync.overlap = on with loop.schedule = on_policy; set stream"),
    ],
)
def test_a_sync_that_could_not_overlap_is_refused(
    settings: tuple[str, ...], reason: str, minimal: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load([minimal], [*settings, "sync.overlap=on"])


def test_without_slots_of_their_own_engines_have_the_trainers(minimal: Path) -> None:
    shared = load([minimal], ["training.layout.dp=4", "rollout.tp=2"])
    assert (shared.num_slots, shared.engine_slots, shared.num_engines) == (4, range(4), 2)
    assert shared.as_placed(gpus=True, one_node=True) is shared


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run:\n  name: 2001-02-30\n", r"odd\.yaml:2: the value is not readable: day is out of range"),
        ("run: {name: !!int x}\n", r"odd\.yaml:1: the value is not readable"),
        ("run: {name: !!timestamp x}\n", r"odd\.yaml:1: the value is not readable"),
        ("run: {name: !!python/object:os.system x}\n", r"odd\.yaml:1: the value is not readable"),
        ("run: &a {name: *a}\n", r"odd\.yaml is not readable YAML: .*contains itself"),
        ("run: {name: " + "[" * 3000 + "\n", r"odd\.yaml is not readable YAML: it is nested too deeply"),
        (LAUGHS + "run: {name: *a59}\n", r"odd\.yaml is not readable YAML: its references"),
        ("run: {name: [{a: 1, a: 2}]}\n", r"odd\.yaml:1: .*duplicate key 'a'"),
        ("run: {name: [" + "9" * 5000 + "]}\n", r"odd\.yaml:1: the value is not readable: .*4300 digits"),
    ],
)
def test_yaml_that_is_no_value_is_a_sentence(text: str, expected: str, minimal: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){expected}") as error:
        load([minimal, tmp_path / "odd.yaml"])
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize(
    "value", ["2001-02-30", "{a: 1, a: 2}", "&a [*a]", "[" * 5000, "{? [a] : 1}", "!!int x"]
)
def test_a_word_whose_value_is_none_is_a_sentence(value: str, minimal: Path) -> None:
    with pytest.raises(ConfigError, match=r"the value in 'run\.name=") as error:
        load([minimal], [f"run.name={value}"])
    assert len(str(error.value)) < 2000


def test_a_value_of_a_page_is_shown_by_its_beginning(minimal: Path) -> None:
    with pytest.raises(ConfigError, match=r"loop\.steps") as error:
        load([minimal], [f"loop.steps={'x' * 70_000}"])
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("word", ["off", "on"])
def test_on_and_off_are_names_of_choices_and_still_answer_a_question(word: str, minimal: Path) -> None:
    """YAML 1.1 reads them as booleans, so no choice could be set to them without quotes."""
    config = load([minimal], [f"sync.delta={word}", f"loop={{deterministic: {word}}}"])
    assert config.sync.delta == word and config.loop.deterministic is (word == "on")

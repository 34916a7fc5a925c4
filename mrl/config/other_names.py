"""Names that are no settings here: those of the last release, with today's, and the words of other systems.
Pure."""

from __future__ import annotations

from mrl.config.root import Config
from mrl.config.sections.algorithm import AlgorithmSection, KlSection
from mrl.config.sections.data import DataSection
from mrl.config.sections.loop import LoopSection
from mrl.config.sections.rollout import RolloutSection
from mrl.config.sections.shaping import FilterSection, ShapingSection
from mrl.config.sections.sync import SyncSection
from mrl.rewards.kinds.section import KindPart, RewardSection, RewardSpec
from mrl.rewards.maths.rules import MathsRules
from mrl.section import Section

_REWARD = (KindPart, RewardSpec, RewardSection)

RENAMED: dict[type[Section], dict[str, str]] = {
    Config: {"judge": "reward", "observe": "logging", "sft": "tune", "warm_start": "tune"},
    DataSection: {"over_long": "overlong"},
    FilterSection: {"min_spread": "min_reward_range", "when_spent": "on_exhausted"},
    KlSection: {"place": "location", "times_ratio": "unbiased"},
    LoopSection: {
        "max_sampler_mismatch": "max_rollout_mismatch",
        "max_unjudged_fraction": "max_no_reward_fraction",
    },
    **{key: {"lowest": "min_reward", "unjudged_alarm": "no_reward_alarm"} for key in _REWARD},
    MathsRules: {"several": "on_conflict"},
    RewardSection: {"pool_workers": "workers", "lowest": "min_reward", "unjudged_alarm": "no_reward_alarm"},
    RolloutSection: {
        "compiled": "enforce_eager, which says the opposite: compiled: false is enforce_eager: true",
        "memory_fraction": "gpu_memory_utilization",
        "prefix_cache": "enable_prefix_caching",
        "sleep": "enable_sleep_mode",
    },
    ShapingSection: {"missing_end_penalty": "missing_eos_penalty"},
    SyncSection: {"digests": "verify (full, wire or off)"},
}
"""Section -> a former setting of it -> today's setting of the same section."""

RENAMED_VALUES: dict[type[Section], dict[tuple[str, str], str]] = {
    **{key: {("truncated", "judge"): "score", ("truncated", "lowest"): "min_reward"} for key in _REWARD},
    MathsRules: {("extraction", "hashes"): "gsm8k", ("extraction", "whole"): "whole_response"},
    AlgorithmSection: {
        ("old_logprobs", "sampler"): "rollout",
    },
}
"""Section -> (setting, a former value of it) -> today's value."""

RENAMED_COMMANDS = {"sft": "tune", "warm-start": "tune"}
"""A former command of `mrl` -> today's."""

SYNONYMS = {
    "num_generations": "loop.samples_per_prompt",
    "rollout_n": "loop.samples_per_prompt",
    "n": "loop.samples_per_prompt",
    "n_samples_per_prompt": "loop.samples_per_prompt",
    "train_batch_size": "loop.prompts_per_step (prompts, not samples)",
    "rollout_batch_size": "loop.prompts_per_step (prompts, not samples)",
    "ppo_mini_batch_size": "algorithm.minibatches (a number of minibatches, not their size)",
    "ppo_epochs": "algorithm.epochs",
    "num_iterations": "algorithm.epochs",
    "per_device_train_batch_size": "training.microbatch_tokens (tokens, not samples)",
    "ppo_micro_batch_size_per_gpu": "training.microbatch_tokens (tokens, not samples)",
    "micro_train_batch_size": "training.microbatch_tokens (tokens, not samples)",
    "gradient_accumulation_steps": "training.microbatch_tokens (microbatches follow from it)",
    "num_train_epochs": "loop.steps (a run counts steps; `mrl tune` has tune.epochs)",
    "total_epochs": "loop.steps (a run counts steps; `mrl tune` has tune.epochs)",
    "max_grad_norm": "training.optimizer.clip_grad",
    "learning_rate": "training.optimizer.lr",
    "actor_learning_rate": "training.optimizer.lr",
    "max_completion_length": "rollout.max_response_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "tensor_model_parallel_size": "training.layout.tp (rollout.tp for engines)",
    "tensor_parallel_size": "training.layout.tp (rollout.tp for engines)",
    "pipeline_model_parallel_size": "training.layout.pp",
    "expert_model_parallel_size": "training.layout.ep",
    "gpus_per_node": "launch.slots_per_node (a slot is one GPU, or one share of a machine without)",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enable_sleep_mode": "rollout.enable_sleep_mode",
    "engine_kwargs": "rollout.engine_args",
    "kv_cache_memory_bytes": "rollout.kv_cache_bytes (CPU alone)",
    "adv_estimator": "algorithm.estimator.name",
    "advantage_estimator": "algorithm.estimator.name",
    "kl_coef": "algorithm.kl.coefficient",
    "kl_loss_coef": "algorithm.kl.coefficient (with algorithm.kl.location=loss)",
    "use_kl_loss": "algorithm.kl.location=loss",
    "use_kl_in_reward": "algorithm.kl.location=reward",
    "beta": "algorithm.kl.coefficient",
    "epsilon": "algorithm.loss.clip_low",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "epsilon_high": "algorithm.loss.clip_high",
    "trust_remote_code": "model.trust_remote_code (for tokenizers; families are implemented here)",
    "lora": "training.lora.rank (and what else `mrl settings training.lora` shows)",
    "peft": "training.lora.rank (and what else `mrl settings training.lora` shows)",
    "lora_rank": "training.lora.rank",
    "lora_alpha": "training.lora.alpha",
    "target_modules": "training.lora.targets",
    "report_to": "logging.trackers",
    "logger": "logging.trackers",
    "save_freq": "loop.checkpoint.every_steps",
    "test_freq": "loop.validation.every_steps",
    "total_training_steps": "loop.steps",
    "max_steps": "loop.steps",
    "reward_funcs": "reward={kind: plugin, path: file.py:function, style: trl}",
    "custom_reward_function": "reward={kind: plugin, path: file.py:function, style: verl}",
    "reward_model": "reward={kind: reward_model, path: http://...}",
    "multi_turn": "agent.environment (samples are episodes then), agent.domains for several",
    "gradient_checkpointing": "training.recompute",
    "enable_gradient_checkpointing": "training.recompute",
    "activation_checkpointing": "training.recompute",
    "bf16": "training.dtype (rollout.dtype for engines)",
    "torch_dtype": "training.dtype (rollout.dtype for engines)",
    "param_offload": "training.offload",
    "overlap_comm": "training.overlap_grad_reduce",
    "ddp_bucket_size": "training.bucket_size",
    "override_ddp_config": "training.overlap_grad_reduce, training.bucket_size",
    "optimizer_offload": "training.optimizer.offload_fraction",
    "n_gpus_per_node": "launch.slots_per_node (a slot is one GPU, or one share of a machine without)",
    "num_gpus": "training.layout.dp (the layout says how many slots a run takes)",
}
"""A word of verl, TRL, OpenRLHF, slime or vLLM -> the setting that does the same."""

_SPLIT = "training.layout (`mrl settings training.layout`) splits the model, and optimizer states lie spread over dp"
UNSUPPORTED = {
    "fsdp": _SPLIT,
    "fsdp_config": _SPLIT,
    "deepspeed": _SPLIT,
    "zero_stage": _SPLIT,
    "overlap_param_gather": "an update ends with its parameters gathered (training.overlap_grad_reduce is of gradients)",
    "use_vllm": "engines are vLLM's always; rollout (`mrl settings rollout`) has their settings",
    "vllm_mode": "launch.engine_slots gives engines slots of their own, 0 has them share the trainer's",
    "sglang": "engines are vLLM's; rollout (`mrl settings rollout`) has their settings",
    "load_in_4bit": "trained weights are wide; rollout.quantization narrows those of the engines",
    "load_in_8bit": "trained weights are wide; rollout.quantization narrows those of the engines",
}
"""A word of theirs that nothing here does the same as -> what is there in its place."""


RENAMED_METRICS = {
    "val/accuracy": "val/reward; val/accuracy is only there if the reward is 0 or 1 by its kind"
}
"""A former metric -> today's."""


def renamed(section: type, key: str, value: object = None) -> str:
    """Today's name of a former setting of a section, or of a former value of a setting; empty where it never
    was one."""
    if key in RENAMED.get(section, {}):
        return RENAMED[section][key]
    return RENAMED_VALUES.get(section, {}).get((key, value), "") if isinstance(value, str) else ""


def answer(word: str) -> str:
    """What an error says about a former metric or a word of another system; empty where the word is not in the table."""
    if word in RENAMED_METRICS:
        return f"; the metric is renamed to {RENAMED_METRICS[word]}"
    if word in UNSUPPORTED:
        return f"; {word} is not supported: {UNSUPPORTED[word]}"
    return f"; did you mean {SYNONYMS[word]}?" if word in SYNONYMS else ""

"""Names that are no settings here: those of the last release, with today's or with what to do instead, and the words of
other systems. Pure."""

from __future__ import annotations

from mrl.config.root import Config
from mrl.config.sections.agent import AgentSection
from mrl.config.sections.algorithm import (
    AlgorithmSection,
    EntropySection,
    EstimatorSection,
    KlSection,
)
from mrl.config.sections.correction import (
    GeometricCorrection,
    ProductCorrection,
    SequenceMaskCorrection,
    TruncatedCorrection,
)
from mrl.config.sections.data import ColumnMap, DataSection, DifficultySection
from mrl.config.sections.distillation import DistillationSection
from mrl.config.sections.export import ExportSection
from mrl.config.sections.logging import LoggingSection
from mrl.config.sections.loop import LoopSection, ValidationSection
from mrl.config.sections.policy_loss import CispoLoss, GspoLoss, ToprLoss
from mrl.config.sections.rollout import RolloutSection
from mrl.config.sections.shaping import FilterSection, OverlongSection, ShapingSection
from mrl.config.sections.stream import StreamSection
from mrl.config.sections.sync import SyncSection
from mrl.config.sections.training import TrainingSection
from mrl.config.sections.tune import ObjectiveSection
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.instructions.instruction_rules import RepetitionRules
from mrl.rewards.judges.judge_rules import EngineSection, LlmRules, RewardModelRules
from mrl.rewards.kinds.reward_section import KindPart, RewardSection, RewardSpec
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.section import Section

_REWARD = (KindPart, RewardSpec, RewardSection)

RENAMED: dict[type[Section], dict[str, str]] = {
    Config: {"judge": "reward", "observe": "logging", "sft": "tune", "warm_start": "tune"},
    DataSection: {"over_long": "overlong"},
    FilterSection: {"min_spread": "min_reward_range"},
    KlSection: {"place": "location", "times_ratio": "unbiased"},
    LoopSection: {
        "max_sampler_mismatch": "max_rollout_mismatch",
        "max_unjudged_fraction": "max_no_reward_fraction",
    },
    **{key: {"lowest": "min_reward"} for key in _REWARD},
    MathsRules: {"several": "on_conflict"},
    RewardSection: {"pool_workers": "workers", "lowest": "min_reward"},
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
    MathsRules: {("extraction", "hashes"): "gsm8k", ("extraction", "whole"): "whole_response"},
    AlgorithmSection: {
        ("old_logprobs", "sampler"): "rollout",
    },
}
"""Section -> (setting, a former value of it) -> today's value."""

_SERVER: dict[str | tuple[str, str], str] = {
    **{
        name: f"set server.{name}, beside the verifier's kind"
        for name in ("api_key_env", "max_calls", "model", "tokenizer", "tries")
    },
    "calls_per_minute": "delete it; a call that the server refuses (status 429) is made again when it says",
    "max_tokens": "set server.max_calls; llm.reply_tokens bounds each reply",
}

_CODE_SERVICE: dict[str | tuple[str, str], str] = {
    ("kind", "code_service"): "set kind: code, or ask the service in a plug-in (docs/rewards.md)"
}

REMOVED: dict[type[Section], dict[str | tuple[str, str], str]] = {
    AgentSection: {
        "answer_kib": "delete it; an environment's answer has 256 KiB at most",
        "close_seconds": "delete it; an environment has 5 s to close",
        "episode_seconds": "set max_turns and step_seconds, which bound an episode",
        "max_bad_calls": "delete it; two turns with a call that cannot be carried out are answered, a third ends the episode",
        "max_context": "set model.max_length, which bounds an episode with its prompt",
    },
    AlgorithmSection: {
        ("loss", "dual_clip"): "write loss: {name: ppo_clip, dual_clip: 3.0}",
        "value": "set algorithm.value_clip; errors are averaged over tokens",
    },
    ColumnMap: {
        "chat_template_kwargs": "give the rows' column this name",
        "tools": "give the rows' column this name",
    },
    CispoLoss: {"mask_clipped": "weights are always kept at the bound"},
    DataSection: {"answer_in_prompt": "delete it; leave such rows out of the file"},
    EntropySection: {
        "delta": "delete it; the coefficient moves by 0.005 a step",
        "max_coefficient": "delete it; the moving coefficient is at most 1",
    },
    EstimatorSection: {
        "clip": "delete it; advantages are not clipped; shaping.clip bounds rewards",
        "ddof": "delete it; standard deviations have ddof 1",
        "discount": "delete it; only tokens of the policy discount",
        "eps": "delete it; 1e-6 is added to a standard deviation",
        "outcome_coefficient": "set the weights of the verifiers among reward.parts",
        "process_coefficient": "set the weight of the verifier that gives values of tokens",
        "tolerance": "delete it; a group is degenerate if its rewards differ by 1e-6 of the largest or less",
        "whiten_per_domain": "delete it; whitening is over the batch",
    },
    DistillationSection: {
        "clip": "delete it; a sampled token's term is at most 10",
        ("estimator", "top_k"): "set exact, which holds a hidden state a token, not logits",
        "top_k": "delete it; estimator = exact takes the whole vocabulary",
    },
    DifficultySection: {"confidence": "delete it; it is 0.9"},
    ExportSection: {"max_shard_bytes": "delete it; 5 GB; `mrl export` has --max-shard-bytes"},
    FilterSection: {
        "max_prompts": "set max_rounds; a step samples 4096 prompts at most",
        "mean_high": "set mean_range: [low, high]",
        "mean_low": "set mean_range: [low, high]",
        "on_exhausted": "delete it; a step whose rounds are spent trains on fewer groups",
    },
    GeometricCorrection: {"low": "delete it; only large weights are cut"},
    GspoLoss: {"normalise": "delete it; the ratio is the geometric mean over tokens"},
    KlSection: {
        "clamp": "delete it; an estimate is at most 10 nats",
        "controller": "set kl.target, and kl.horizon, for a coefficient that moves; without a target it stays",
    },
    ObjectiveSection: {
        "distribution": "delete it; a reward model gives one score",
        "heads": "delete it; a reward model has one head",
        "margin_scale": "scale the margins of the rows; without a margin a row has none",
    },
    OverlongSection: {"capped": "delete it; the penalty stops growing at max_tokens"},
    ProductCorrection: {"low": "delete it; only large weights are cut"},
    SequenceMaskCorrection: {"token_high": "delete it; token_weights = truncated cuts them at 2"},
    **{
        key: {
            "truncated": "set algorithm.shaping.stop_properly: 0 rewards no truncated response",
            "value_range": "raise an error in the plug-in, which makes the verifier count as failed",
            "workers": "set reward.workers, for every kind of work",
        }
        for key in (KindPart, RewardSpec)
    },
    CodeRules: {
        "cases_per_process": "delete it; 16 cases of a function-call task share a process",
        "file_mib": "delete it; the writable file system has 32 MiB",
        "output_kib": "delete it; a program may write 256 KiB",
        "processes": "delete it; a program has 32 processes at most",
    },
    EngineSection: {
        "enforce_eager": "write arguments: [--enforce-eager]",
        "num_threads": "delete it; a rank has one thread",
        "on_outage": "set restarts; 0 stops the run when the server ends",
        "start_deadline_seconds": "set launch.start_deadline_seconds",
    },
    LlmRules: _SERVER
    | {
        "asks": "delete it; two replies are asked for until one holds a verdict",
        "canaries": "delete it; mrl rewards check CONFIG --gold FILE says which attacks a judge falls for",
        "compare": "delete it; ask in a template of your own which is better, with choices for it",
        "max_canary_passes": "delete it; mrl rewards check CONFIG --gold FILE says which attacks a judge falls for",
        "max_chars": "delete it; the judge sees the last 20,000 characters",
        "temperature": "write body: {temperature: 0.7}; it is 0 at the first ask",
        "max_order_flips": "delete it; nothing is asked in two orders",
    },
    LoggingSection: {
        "mlflow": "delete it; logging.trackers has tensorboard and wandb",
        ("trackers", "mlflow"): "tensorboard and wandb are there, and metrics.jsonl has every row",
        "device_peak_flops": "delete it; the device's name says it",
        "token_values": "delete it; four samples of a step are written token by token",
        "tracker_deadline_seconds": "delete it; the end of a run waits 10 s for a tracker",
        "tracker_samples_every_steps": "delete it; trackers get a table of samples every 20 steps",
        "wandb": "set wandb_project, and WANDB_ENTITY, WANDB_MODE, WANDB_RUN_GROUP and WANDB_TAGS in the environment",
    },
    ValidationSection: {"min_p": "set rollout.min_p"},
    LoopSection: {"router_margin": "delete it; router margins below 1e-5 are near-ties"},
    MathsRules: {
        "imaginary_unit": "delete it; i is the imaginary unit",
        "irrational": "delete it; correctly rounded decimals of six digits and more are accepted",
        "lists": "delete it; a list without brackets has no order",
        "max_answer_chars": "delete it; an answer has 400 characters at most",
        "percent": "delete it; a percent sign is dropped",
        "unevaluated": "delete it; an operation left to do is wrong where the ground truth is an integer",
    },
    RepetitionRules: {"max_penalty": "set weight, the factor of a verifier among parts"},
    RewardModelRules: _SERVER | {"disagreement_weight": "delete it; a reward model has one head"},
    KindPart: _CODE_SERVICE,
    RewardSpec: _CODE_SERVICE,
    RewardSection: _CODE_SERVICE
    | {
        "idle_seconds": "delete it; a worker without work for 900 s ends",
        "min_agreement": "delete it; an error is written when agreement with witnesses falls",
        "no_reward_alarm": "set loop.max_no_reward_fraction, above which the run stops; from 0.02 on a warning is written",
        "queue_limit": "delete it; 4096 samples wait at most",
        "right_above": "delete it; a reward above 0.5 says that a response is right",
        "value_range": "raise an error in the plug-in, which makes the verifier count as failed",
        "truncated": "set algorithm.shaping.stop_properly: 0 rewards no truncated response",
    },
    ShapingSection: {
        "clip_high": "set clip: [low, high]",
        "clip_low": "set clip: [low, high]",
        "length_reference": "give a penalty with shaping.overlong, or scale rewards in a plug-in",
        "normalise": "set algorithm.estimator.scale, which centres and divides, or whiten",
        "weight": "set the weight of the domain's verifiers",
    },
    StreamSection: {
        "age_budget": "delete it; stream.max_age is the largest age",
        "clock": "delete it; loop.deterministic repeats a run to the bit, on_policy or with stream.max_age 0",
        "elastic_slots": "delete it; launch.engine_slots is the engines' share of the slots",
        "record": "delete it; no schedule is recorded",
        "window": "delete it; stream.max_age lets generation run further ahead",
        "in_flight": "set stream.kv_cache: recompute or keep",
        "pool": "delete it; judged groups wait in the driver's memory, which mrl plan counts",
        "update_ticks": "delete it; there is no logical clock",
        "verdict_ticks": "delete it; there is no logical clock",
    },
    ToprLoss: {
        "clip_high": "delete it; weights are cut to [0, 1], as in the paper",
        "clip_low": "delete it; weights are cut to [0, 1], as in the paper",
        "positive_above": "delete it; a sample with a reward above 0 is positive",
    },
    TrainingSection: {
        "router_bias": "set router_bias_rate: 0 leaves the biases as they are, 0.001 moves them"
    },
    SyncSection: {
        "mode": "delete it; weights always move by the plan, which also brings the tensors that engines take whole",
    },
    TruncatedCorrection: {"low": "delete it; only large weights are cut"},
}
"""Section -> a removed setting of it, or (setting, a removed value of it) -> what to do instead."""

RENAMED_COMMANDS = {"sft": "tune", "warm-start": "tune"}
"""A former command of `mrl` -> today's."""

REMOVED_WORDS = {
    "bench": "python -m benchmarks.schedules and python -m benchmarks.step, of the repository, measure schedules and steps",
    "replay": "no schedule is recorded; loop.deterministic repeats a run to the bit, and mrl audit RUN checks its prompts",
    "plan --stream": "mrl plan CONFIG prints what loop.schedule=stream gains (docs/running-ahead.md)",
    "watch": "mrl report RUN writes a page and mrl samples RUN prints samples, also while a run goes on; "
    "logging.trackers shows curves live",
}
"""A former command, or a command and a former option of it -> what to do in its place."""

_WORDS = {
    "loop.samples_per_prompt": "num_generations rollout_n n n_samples_per_prompt",
    "algorithm.epochs": "ppo_epochs num_iterations max_epochs",
    "training.microbatch_tokens (tokens, not samples)": (
        "per_device_train_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size "
        "log_prob_micro_batch_size_per_gpu"
    ),
    "loop.steps (a run counts steps; `mrl tune` has tune.epochs)": (
        "num_train_epochs total_epochs num_episodes"
    ),
    "training.optimizer.clip_grad": "max_grad_norm optim.clip_grad grad_clip max_norm",
    "training.optimizer.lr": "learning_rate actor_learning_rate optim.lr",
    "rollout.max_response_tokens": (
        "max_completion_length max_response_length generate_max_len rollout_max_response_len response_length"
    ),
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len rollout_max_prompt_len",
    "training.layout.tp (rollout.tp for engines)": "tensor_model_parallel_size tensor_parallel_size",
    "training.layout.pp": "pipeline_model_parallel_size",
    "training.layout.ep": "expert_model_parallel_size",
    "launch.slots_per_node (a slot is one GPU, or one share of a machine without)": (
        "gpus_per_node n_gpus_per_node actor_num_gpus_per_node"
    ),
    "rollout.gpu_memory_utilization": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "rollout.enforce_eager": "enforce_eager",
    "rollout.enable_prefix_caching": "enable_prefix_caching",
    "rollout.enable_sleep_mode": "enable_sleep_mode",
    "rollout.engine_args": "engine_kwargs",
    "rollout.kv_cache_bytes (CPU alone)": "kv_cache_memory_bytes",
    "algorithm.estimator.name": "adv_estimator advantage_estimator",
    "algorithm.kl.coefficient": "kl_coef beta init_kl_coef",
    "algorithm.kl.coefficient (with algorithm.kl.location=loss)": "kl_loss_coef",
    "algorithm.kl.location=loss": "use_kl_loss",
    "algorithm.kl.location=reward": "use_kl_in_reward",
    "algorithm.loss.clip_low": "epsilon clip_ratio_low eps_clip",
    "algorithm.loss.clip_high": "clip_ratio_high epsilon_high eps_clip_high",
    "model.trust_remote_code (for tokenizers; families are implemented here)": "trust_remote_code",
    "training.lora.rank (and what else `mrl settings training.lora` shows)": "lora peft peft_config",
    "training.lora.rank": "lora_rank",
    "training.lora.alpha": "lora_alpha",
    "training.lora.targets": "target_modules",
    "logging.trackers": "report_to logger use_wandb use_tensorboard",
    "loop.checkpoint.every_steps": "save_freq save_steps save_interval",
    "loop.validation.every_steps": "test_freq eval_steps eval_interval",
    "loop.steps": "total_training_steps max_steps num_rollout",
    "reward={kind: plugin, path: file.py:function, style: trl}": "reward_funcs",
    "reward={kind: plugin, path: file.py:function, style: verl}": "custom_reward_function",
    "reward={kind: reward_model, path: http://...}": "reward_model",
    "agent.environment (samples are episodes then), agent.domains for several": (
        "multi_turn environment_factory agent_func_path custom_generate_function_path"
    ),
    "training.recompute": (
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing recompute_granularity"
    ),
    "training.dtype (rollout.dtype for engines)": "bf16 torch_dtype",
    "training.offload": "param_offload deepspeed_enable_sleep",
    "training.overlap_grad_reduce": "overlap_comm",
    "training.bucket_size": "ddp_bucket_size",
    "training.overlap_grad_reduce, training.bucket_size": "override_ddp_config",
    "training.optimizer.offload_fraction": "optimizer_offload adam_offload optimizer_cpu_offload",
    "training.layout.dp (the layout says how many slots a run takes)": "num_gpus",
    "loop.prompts_per_step (prompts, not samples)": "rollout_batch_size",
    "loop.prompts_per_step (prompts, not samples; OpenRLHF's is algorithm.minibatches, a number of them)": (
        "train_batch_size"
    ),
    "algorithm.minibatches (a number of minibatches, not their size)": (
        "ppo_mini_batch_size steps_per_generation num_steps_per_rollout"
    ),
    "training.microbatch_tokens": (
        "ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu train_max_tokens_per_gpu "
        "max_tokens_per_gpu use_dynamic_bsz"
    ),
    "training.microbatch_tokens (microbatches follow from it; algorithm.minibatches is the number of updates)": (
        "gradient_accumulation_steps"
    ),
    "model.path": "pretrain hf_checkpoint",
    "model.reference_path": "ref_load",
    "data.train": "train_files train_dataset prompt_data",
    "data.validation": "val_files eval_dataset eval_prompt_data",
    "data.columns.prompt": "prompt_key input_key",
    "data.columns.answer": "label_key",
    "data.columns.domain": "reward_fn_key",
    "data.overlong": "filter_overlong_prompts truncation",
    "data.chat_template_kwargs": "apply_chat_template_kwargs",
    "rollout.temperature": "rollout_temperature",
    "rollout.top_p": "rollout_top_p",
    "rollout.top_k": "rollout_top_k",
    "rollout.tp": "rollout.tensor_model_parallel_size vllm_tensor_parallel_size rollout_num_gpus_per_engine",
    "launch.engine_slots (0: engines share the trainer's slots)": (
        "hybrid_engine colocate_all_models vllm_num_engines colocate rollout_num_gpus"
    ),
    "reward={kind: plugin, path: file.py:function}, with a style": "remote_rm_url custom_rm_path",
    "agent.environment (a row's own tools: data.columns.tools)": "tools",
    "algorithm.estimator.name (grpo or dr_grpo), or algorithm.estimator.scale": "scale_rewards",
    "algorithm.estimator.gamma": "gamma",
    "algorithm.estimator.lam": "lam lambd",
    "algorithm.loss (its name)": "policy_loss.loss_mode loss_mode policy_loss_type importance_sampling_level",
    "algorithm.loss (its name), and algorithm.aggregation.mode": "loss_type",
    "algorithm.aggregation.mode": "loss_agg_mode calculate_per_token_loss",
    "algorithm.loss.clip_low and algorithm.loss.clip_high": "clip_ratio eps_clip_low_high",
    "algorithm.kl.kind": "kl_loss_type kl_penalty kl_estimator",
    "algorithm.kl.target": "kl_ctrl.type kl_ctrl.target_kl",
    "algorithm.kl.horizon": "kl_ctrl.horizon",
    "algorithm.filter": "filter_groups dynamic_filtering dynamic_sampling_filter_path",
    "algorithm.shaping.overlong": "overlong_buffer overlong_buffer_len",
    "algorithm.shaping.mask_truncated": "mask_truncated_completions",
    "algorithm.correction": (
        "rollout_correction vllm_importance_sampling_correction enable_vllm_is_correction use_tis"
    ),
    "algorithm.entropy.coefficient": "entropy_coeff entropy_loss_coef entropy_coef",
    "routing.replay": "router_replay use_routing_replay use_rollout_routing_replay",
    "training.layout.tp": "megatron.tensor_model_parallel_size ds_tensor_parallel_size",
    "training.layout.cp": "context_parallel_size ring_attn_size ulysses_sequence_parallel_size",
    "training.layout.dp (with tp, pp and cp the slots of a run; launch.slots_per_node of them are on a node)": (
        "nnodes actor_num_nodes"
    ),
    "training.dtype": "model_dtype",
    "critic.optimizer.lr": "critic.optim.lr critic_learning_rate",
    "training.optimizer.weight_decay": "optim.weight_decay",
    "training.optimizer.warmup_steps": "lr_warmup_steps warmup_steps_ratio lr_warmup_steps_ratio",
    "critic.warmup_steps": "critic_warmup freezing_actor_steps num_critic_only_steps",
    "loop.schedule (stream)": "async_train",
    "loop.checkpoint.keep": "max_actor_ckpt_to_keep save_total_limit",
    "export.every_steps": "model_merger save_model save_hf_ckpt save_hf",
    "loop.validation.before_training": "val_before_train",
    "loop.validation.num_samples": (
        "val_kwargs.n num_generations_eval eval_n_samples_per_prompt n_samples_per_eval_prompt"
    ),
    "loop.validation.temperature": "val_kwargs.temperature",
    "loop.validation.top_p": "val_kwargs.top_p",
    "logging.wandb_project": "project_name",
    "run.name": "experiment_name run_name wandb_run_name wandb_group",
    "run.folder": "default_local_dir output_dir",
}
"""The setting that does the same -> words of verl, TRL, OpenRLHF, slime or vLLM, or the ends of their dotted names; docs/moving.md has
them too."""

SYNONYMS = {word: setting for setting, words in _WORDS.items() for word in words.split()}
"""A word of theirs -> the setting that does the same."""

OTHERS_SECTIONS = frozenset(
    {"actor_rollout_ref", "trainer", "reward_model", "custom_reward_function", "megatron"}
)
"""Sections of verl that are none here."""

_SPLIT = "training.layout (`mrl settings training.layout`) splits the model, and optimizer states lie spread over dp"
UNSUPPORTED = {
    "fsdp": _SPLIT,
    "fsdp_config": _SPLIT,
    "deepspeed": _SPLIT,
    "zero_stage": _SPLIT,
    "overlap_param_gather": "an update ends with its parameters gathered (training.overlap_grad_reduce is of gradients)",
    "use_vllm": "engines are vLLM's always; rollout (`mrl settings rollout`) has their settings",
    "vllm_mode": "launch.engine_slots gives engines slots of their own, 0 has them share the trainer's",
    "rollout.name": "engines are vLLM's; rollout (`mrl settings rollout`) has their settings",
    "sglang": "engines are vLLM's; rollout (`mrl settings rollout`) has their settings",
    "load_in_4bit": "trained weights are wide; rollout.quantization narrows those of the engines",
    "load_in_8bit": "trained weights are wide; rollout.quantization narrows those of the engines",
}
"""A word of theirs that nothing here does the same as -> what is there in its place."""


RENAMED_METRICS = {
    "sync/fallback_bytes": "sync/whole_bytes",
    "sync/gather_seconds": "sync/move_seconds",
    "val/accuracy": "val/reward; val/accuracy is only there if the reward is 0 or 1 by its kind",
}
"""A former metric -> today's."""


def renamed(section: type, key: str, value: object = None) -> str:
    """Today's name of a former setting of a section, or of a former value of a setting; empty where it never
    was one."""
    if key in RENAMED.get(section, {}):
        return RENAMED[section][key]
    return RENAMED_VALUES.get(section, {}).get((key, value), "") if isinstance(value, str) else ""


def removed(section: type, key: str, value: object = None) -> str:
    """Return what to do instead of a removed setting of a section, or of a removed value of a setting; empty if it was not
    removed."""
    gone = REMOVED.get(section, {})
    return gone.get(key, "") or (gone.get((key, value), "") if isinstance(value, str) else "")


def answer(path: str) -> str:
    """What an error says about a former metric or another system's name: about the longest end of a dotted path that is in the tables,
    or of what stands before its last name. Empty if there is none.

    >>> answer("actor_rollout_ref.actor.optim.lr"), answer("peft_config.r")[:40]
    ('; did you mean training.optimizer.lr?', '; did you mean training.lora.rank (and w')
    """
    parts = path.split(".")
    for word in (".".join(parts[first:]) for first in range(len(parts))):
        if word in RENAMED_METRICS:
            return f"; the metric is renamed to {RENAMED_METRICS[word]}"
        if word in UNSUPPORTED:
            return f"; {word} is not supported: {UNSUPPORTED[word]}"
        if word in SYNONYMS:
            return f"; did you mean {SYNONYMS[word]}?"
    return answer(path.rpartition(".")[0]) if len(parts) > 1 else ""

"""Words of other systems (verl, TRL, OpenRLHF, slime) for what is named otherwise here, or is not there. Pure."""

from __future__ import annotations

HERE = {
    "num_generations": "loop.samples_per_prompt",
    "rollout_n": "loop.samples_per_prompt",
    "n_samples_per_prompt": "loop.samples_per_prompt",
    "train_batch_size": "loop.prompts_per_step (prompts, not samples)",
    "rollout_batch_size": "loop.prompts_per_step (prompts, not samples)",
    "ppo_mini_batch_size": "algorithm.minibatches (a number of minibatches, not their size)",
    "ppo_epochs": "algorithm.epochs",
    "num_iterations": "algorithm.epochs",
    "learning_rate": "training.optimizer.lr",
    "actor_learning_rate": "training.optimizer.lr",
    "max_completion_length": "rollout.max_response_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "tensor_model_parallel_size": "training.layout.tp, or rollout.tp for engines",
    "tensor_parallel_size": "training.layout.tp, or rollout.tp for engines",
    "pipeline_model_parallel_size": "training.layout.pp",
    "expert_model_parallel_size": "training.layout.ep",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "enforce_eager": "rollout.compiled=false",
    "enable_prefix_caching": "rollout.prefix_cache",
    "adv_estimator": "algorithm.estimator.name",
    "advantage_estimator": "algorithm.estimator.name",
    "kl_coef": "algorithm.kl.coefficient",
    "kl_loss_coef": "algorithm.kl.coefficient, with algorithm.kl.place=loss",
    "use_kl_loss": "algorithm.kl.place=loss",
    "beta": "algorithm.kl.coefficient",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "epsilon_high": "algorithm.loss.clip_high",
    "report_to": "observe.trackers",
    "logger": "observe.trackers",
    "save_freq": "loop.checkpoint.every_steps",
    "test_freq": "loop.validation.every_steps",
    "total_training_steps": "loop.steps",
    "max_steps": "loop.steps",
    "reward_funcs": "judge={kind: plugin, path: file.py:function, style: trl}",
    "custom_reward_function": "judge={kind: plugin, path: file.py:function, style: verl}",
}
"""Their word -> our setting."""

ABSENT = {
    "lora": "all weights are trained",
    "lora_rank": "all weights are trained",
    "peft": "all weights are trained",
    "reward_model": "rewards come from verifiers and functions; see `mrl settings judge`",
    "trust_remote_code": "families are implemented here and tokenizers are read without foreign code",
    "multi_turn": "an episode is one prompt and one response",
}
"""Their word -> what there is instead."""


def answer(word: str) -> str:
    """What to say of a word of another system; empty for one that is in neither table."""
    if word in HERE:
        return f"; here that is {HERE[word]}"
    return f"; not supported: {ABSENT[word]}" if word in ABSENT else ""

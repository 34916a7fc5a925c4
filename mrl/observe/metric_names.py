"""Every metric of metrics.jsonl and expert_load.jsonl, with a sentence: what docs/metrics.md is made from. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

METRICS = {
    "step": "Step of the loop, from 1; row 0 is the validation of the starting point.",
    "reward/mean": "Mean reward of the samples generated for the step, before filtering and shaping.",
    "reward/max": "Largest of those rewards.",
    "reward/min": "Smallest of those rewards.",
    "reward/mean/<domain>": "Their mean in one domain, where there are several.",
    "reward/<part>": "Mean of one part, where a reward is a sum of named parts.",
    "reward/seconds_p99": "99th percentile of a reward worker's seconds for one sample.",
    "reward/no_reward_frac": "Share of the generated samples without a reward: the reward worker failed.",
    "reward/no_reward": "Samples of the trained groups without a reward; they enter no statistic and no loss.",
    "reward/without_tokens": "Samples with a reward and no token of the policy.",
    "reward/masked_truncated": "Truncated samples that count in their groups and are not trained on.",
    "reward/raw_mean": "Mean reward of the trained groups' samples, before shaping.",
    "reward/shaped_mean": "Mean of the same rewards after shaping.",
    "reward/clipped_frac": "Share of the same rewards that shaping.clip_low or clip_high changed.",
    "reward/kl_reference": "KL to the reference per token, in nats, with kl.location = reward or a moving coefficient.",
    "reward/kl_coefficient": "Weight of that KL in the reward.",
    "reward/kl_clamped_frac": "Share of its tokens that kl.clamp changed.",
    "group/generated": "Groups that went through the filter in the step.",
    "group/kept": "Groups that the filter kept.",
    "group/kept_frac": "Share of the groups that the filter kept.",
    "group/kept_frac/<domain>": "The same in one domain, where there are several.",
    "group/all_correct_frac": "Share of the groups left out because every reward is at least 1.",
    "group/all_wrong_frac": "Share of the groups left out because every reward is at most 0.",
    "group/no_spread_frac": "Share of the groups left out because their rewards are equal, between 0 and 1.",
    "group/mean_outside_frac": "Share of the groups left out because their mean is outside filter.mean_low and mean_high.",
    "group/no_reward_frac": "Share of the groups left out because samples have no reward.",
    "group/resampled": "Groups generated beyond loop.prompts_per_step.",
    "group/rounds": "Rounds of generation in the step.",
    "group/surplus": "Groups kept beyond those the step needs; the next step trains them.",
    "group/short": "Groups missing from the step.",
    "group/aged_frac": "Share of the trained groups with tokens of an earlier version of the weights.",
    "group/degenerate_samples_frac": "Share of the trained samples whose group has equal shaped rewards: advantage 0.",
    "rollout/samples": "Samples generated for the step.",
    "rollout/groups": "Groups that are trained.",
    "rollout/response_tokens_mean": "Mean response length in tokens.",
    "rollout/response_tokens_p99": "99th percentile of the response length in tokens.",
    "rollout/truncated_frac": "Share of the samples cut off at rollout.max_response_tokens.",
    "rollout/aborted": "Samples that were aborted.",
    "rollout/failed": "Samples whose generation failed.",
    "stream/slots_used": "Groups on their way as the step took its own; a step whose result no engine serves counts as a batch.",
    "stream/wait_for_groups_seconds": "Seconds that the step waited for its groups.",
    "stream/segments_per_sample": "Mean number of segments of a trained sample; 1 is a response that no weight sync met.",
    "stream/parked": "Unfinished responses parked since the step before took its groups.",
    "stream/park_seconds": "Seconds of the driver for parking them and for going on with them.",
    "stream/reprefill_tokens": "Tokens of prompts and responses that engines compute again to go on with them.",
    "stream/held_by/<holder>": "Share of the pumps' time in which the oldest group waited for engines, verdicts or slots.",
    "pool/bytes": "Bytes of the judged groups that no served version is made of, as the step took its own.",
    "pool/spilled_bytes": "Of these, those in files: beyond stream.pool.memory_bytes.",
    "advantage/token_mean": "Mean advantage over the trained tokens.",
    "advantage/sample_mean": "Mean over the samples of their tokens' mean advantage.",
    "advantage/abs_max": "Largest absolute advantage.",
    "advantage/clipped_frac": "Share of the tokens whose advantage estimator.clip changed.",
    "policy/loss": "The whole objective: policy loss, KL and entropy terms.",
    "policy/clip_frac_low": "Share of the tokens whose ratio lies below the lower bound and acts there.",
    "policy/clip_frac_high": "Share of the tokens whose ratio lies above the upper bound and acts there.",
    "policy/kl_old": "KL of the old policy from the new one per token (k3), in nats.",
    "policy/ratio_mean": "Mean ratio of new to old probability over the tokens.",
    "policy/ratio_max": "Largest ratio.",
    "policy/empty_sequences": "Sequences of the minibatch without a trained token.",
    "policy/entropy": "Mean entropy per token at the sampling temperature, in nats.",
    "policy/kl_reference": "Mean KL to the reference per token, in nats, with kl.location = loss.",
    "policy/kl_clamped_frac": "Share of its tokens that kl.clamp changed.",
    "policy/kl_loss": "The KL term of the objective.",
    "policy/age_steps": "Largest age of a trained token: versions between the weights that produced it and today's.",
    "policy/aged_token_frac": "Share of the trained tokens of an earlier version of the weights.",
    "policy/age_mean": "Mean age of the trained tokens in versions, under loop.schedule = stream.",
    "policy/age_frac/<age>": "Share of the trained tokens of one age.",
    "policy/ess/<age>": "Effective sample size of the tokens of one age over their number, by w = exp(trained - sampled log-prob).",
    "policy/kl_behaviour/<age>": "KL of the trained policy from the one that sampled, over the tokens of one age (k3), in nats.",
    "policy/rollout_logprob_diff_max": "Largest |engine - trainer log-prob| of today's tokens outside router near-ties.",
    "policy/rollout_logprob_diff_mean": "Mean |engine - trainer log-prob| of the same tokens.",
    "policy/rollout_logprob_near_ties": "Tokens left out of those two because a router's margin is below loop.router_margin.",
    "policy/rollout_logprob_near_tie_diff_max": "Largest |engine - trainer log-prob| of the near-ties.",
    "policy/rollout_mismatch_kl": "KL of the trainer from the engine per token (k3), in nats.",
    "policy/rollout_difference": "Mean |log w| over the tokens, w = exp(old - engine log-prob).",
    "policy/rollout_difference_max": "Largest |log w| of a token.",
    "policy/rollout_weight_token": "Mean w of a token.",
    "policy/rollout_weight_geometric": "Mean over the tokens of their sequence's geometric mean of w.",
    "policy/rollout_weight_product": "Mean over the tokens of their sequence's product of w.",
    "critic/explained_variance": "Share of the returns' variance that the old values explain; 1 is all of it.",
    "critic/clip_frac": "Share of the tokens whose value is clipped and acts there.",
    "critic/value_mean": "Mean value over the tokens.",
    "critic/return_mean": "Mean return over the tokens.",
    "critic/error_squared": "Mean squared error of the values, without their clip.",
    "<optim|critic>/loss": "Loss of the updates of the policy (optim) or the critic.",
    "<optim|critic>/grad_norm": "Global gradient norm before clipping.",
    "<optim|critic>/lr": "Learning rate.",
    "<optim|critic>/optimizer_steps": "Optimizer steps since the run began.",
    "<optim|critic>/skipped": "Share of the updates that changed nothing: nothing to train on, or a number that is not finite.",
    "moe/load_max_over_mean": "Tokens of the busiest expert over those of the mean expert, mean over layers; 1 is even.",
    "moe/load_max_over_mean_max": "The same in the worst layer.",
    "moe/load_entropy": "Entropy of the experts' shares over its largest value, mean over layers; 1 is even.",
    "moe/load_entropy_min": "The same in the worst layer.",
    "moe/bias_range_max": "Largest minus smallest correction bias of a layer, in the layer where that is most.",
    "moe/layers/<layer>/load_max_over_mean": "The load of one layer, in expert_load.jsonl.",
    "moe/layers/<layer>/load_entropy": "The entropy of one layer, in expert_load.jsonl.",
    "routing/agreement": "Share of the experts given by routing.replay that the trainer's routers would have chosen, mean over layers.",
    "routing/agreement_min": "The same in the worst layer.",
    "sync/seconds": "Duration of the weight sync, as the driver sees it.",
    "sync/bytes": "Bytes moved to all engine ranks.",
    "sync/cross_slot_bytes": "Of these, what came from other slots.",
    "sync/fallback_bytes": "Of these, what went by the gather path because no static plan moves it.",
    "sync/wait_seconds": "Longest wait of an engine rank for its sender.",
    "sync/copy_seconds": "Longest copying on an engine rank.",
    "sync/load_seconds": "Longest loading into vLLM's parameters on an engine rank.",
    "sync/process_seconds": "Longest processing after loading on an engine rank.",
    "sync/gather_seconds": "Longest packing, collectives or messages and unpacking on a trainer rank.",
    "sync/pack_seconds": "Of these, what the rank's own copies took.",
    "sync/commit_seconds": "Longest time from every rank's verification to every rank's commit.",
    "sync/prove_seconds": "Longest digest of a trainer rank's own parameters (sync.verify = full).",
    "sync/sender_wait_seconds": "Longest wait of a trainer rank for its receivers.",
    "time/step_seconds": "Duration of the step without saving.",
    "time/<phase>_seconds": "Duration of one phase: generate, reward, filter, recompute, estimate, update, save or sync.",
    "time/validate_seconds": "Duration of the validation after the step.",
    "perf/tokens_per_second_per_device": "Tokens of the trained samples, prompts included, per second of the step and device.",
    "perf/<step or update>_flops_per_second_per_device": "Operations that the result needs, per second of the step or its updates.",
    "perf/<step or update>_mfu": "The same as a share of the device's peak; left out where the peak is unknown.",
    "perf/driver_seconds": "Seconds of the step in which the driver's thread worked itself.",
    "perf/driver_frac": "The same as a share of the step.",
    "perf/driver_cpu_seconds": "Processor time of the driver's thread in the step.",
    "mem/driver_bytes": "Resident memory of the driver.",
    "mem/gpu_free/<trainer|engine>/<phase>": "Free bytes of the fullest GPU at the end of the phase, whoever holds the rest.",
    "mem/gpu_reserved/<trainer|engine>/<phase>": "Most bytes that torch's allocator of one process has of its GPU then.",
    "mem/gpu_allocated/<trainer|engine>/<phase>": "Most bytes of these in tensors; engines count what sleeps.",
    "mem/gpu_peak/<trainer|engine>/<phase>": "Most bytes that one process had in tensors since the end of the phase before.",
    "mem/host_used/<trainer|engine>/<phase>": "Resident memory of the largest process at the end of the phase.",
    "mem/host_free/<trainer|engine>/<phase>": "Memory that the fullest host has left then.",
    "val/accuracy": "Greedy accuracy on the validation prompts.",
    "val/accuracy/<domain or tag>": "The same for one domain or tag, where there are several.",
    "val/avg@<k>": "Mean score of k samples per prompt.",
    "val/pass@<k>": "Share of the prompts that one of k samples answers right.",
    "val/prompts": "Validation prompts.",
    "val/no_reward": "Greedy samples without a reward.",
}
"""Name -> what the number is; <...> stands for a part of the name that differs. A row leaves out what does not apply to its step."""


def page() -> str:
    """docs/metrics.md: every metric, a heading for each first part of a name."""
    lines = [
        "# Metrics",
        "",
        "Made from the code by `make docs`. A step is one object of `metrics.jsonl` in the run's folder, which trackers take too;",
        "`<...>` stands for a part of the name that differs, and a row leaves out what does not apply to its step. Names ending in",
        "`_max` and `_min` are the largest and smallest of a step's updates, all others of `policy/`, `optim/` and `critic/` their mean.",
        "What begins with `time/`, `perf/` or `mem/` or names seconds depends on the machine; the rest is the same in every run of the",
        "same seed, configuration and machine where `loop.deterministic` is on.",
    ]
    for name, sentence in METRICS.items():
        heading = f"## {name.partition('/')[0].strip('<>').replace('|', ', ')}"
        if heading not in lines:
            lines += ["", heading, ""]
        lines.append(f"- `{name}` {sentence}")
    return "\n".join(lines) + "\n"


def pattern_of(name: str) -> re.Pattern[str]:
    """What matches a name of METRICS: one of its words for <a|b>, one part of a name for any other <...>."""
    parts = re.split(r"(<[^>]*>)", name)
    return re.compile("".join(_part(part) for part in parts))


def _part(part: str) -> str:
    if not part.startswith("<"):
        return re.escape(part)
    return f"({part[1:-1]})" if "|" in part else "[^/]+"


def undescribed(names: Iterable[str]) -> list[str]:
    """The names without a sentence.

    >>> undescribed(["reward/mean", "time/sync_seconds", "reward/of/nobody"])
    ['reward/of/nobody']
    """
    patterns = [pattern_of(name) for name in METRICS]
    return [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)]

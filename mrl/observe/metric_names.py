"""Every metric of metrics.jsonl and expert_load.jsonl, with its unit and a sentence: a contract with whoever reads those files.

docs/metrics.md and the report are made from it; a metric that a real run writes and that is not here fails a test. Pure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """What a number is."""

    unit: str
    """One of UNITS."""
    meaning: str
    """A sentence."""


UNITS = {
    "1": "a plain number",
    "share": "a part of 1",
    "reward": "what the run's verifiers give",
    "reward^2": "the square of that",
    "advantage": "what the estimator makes of it",
    "nats": "the natural logarithm of a probability",
    "tokens": "",
    "tokens/s": "",
    "samples": "",
    "groups": "",
    "prompts": "",
    "segments": "",
    "rounds": "",
    "steps": "",
    "versions": "",
    "s": "",
    "bytes": "",
    "FLOP/s": "an operation on floating-point numbers a second",
}
"""Unit -> what it counts, where its name does not say it."""

METRICS = {
    "step": Metric("1", "Step of the loop, from 1; row 0 is the validation of the starting point."),
    "reward/mean": Metric(
        "reward", "Mean reward of the samples generated for the step, before filtering and shaping."
    ),
    "reward/max": Metric("reward", "Largest of those rewards."),
    "reward/min": Metric("reward", "Smallest of those rewards."),
    "reward/mean/<domain>": Metric("reward", "Their mean in one domain, where there are several."),
    "reward/<part>": Metric(
        "reward", "Mean of one part over the samples that have it, where a reward is a sum of named parts."
    ),
    "reward/seconds_p99": Metric("s", "99th percentile of a reward worker's seconds for one sample."),
    "reward/no_reward_frac": Metric(
        "share", "Share of the generated samples without a reward: the reward worker failed."
    ),
    "reward/no_reward": Metric(
        "samples", "Samples of the trained groups without a reward; they enter no statistic and no loss."
    ),
    "reward/no_reward_length_ratio": Metric(
        "1", "Mean tokens of responses without a reward, of the newest 8 steps, by those with one."
    ),
    "reward/no_reward_unlike": Metric(
        "1",
        "1 where responses without a reward are unlike the others, in length, status, domain or tag; the log says how.",
    ),
    "reward/agreement": Metric(
        "share",
        "Share of the step's witnessed samples whose reward and witness agree on whether they are right.",
    ),
    "reward/witnessed": Metric(
        "samples", "Samples of the step that a witness, a verifier of weight 0, looked at."
    ),
    "reward/agreement_fell": Metric(
        "1", "1 where the newest 8 steps agree less than the first did, or than is asked for, beyond chance."
    ),
    "reward/wrong_taken_for_right_frac": Metric(
        "share",
        "Of the newest 8 steps' samples that a witness says are wrong, the share whose reward says right.",
    ),
    "reward/without_tokens": Metric("samples", "Samples with a reward and no token of the policy."),
    "reward/masked_truncated": Metric(
        "samples", "Truncated samples that count in their groups and are not trained on."
    ),
    "reward/length_correlation": Metric(
        "1",
        "Correlation of reward and response length, both less their group's mean; left out where one never differs.",
    ),
    "reward/raw_mean": Metric("reward", "Mean reward of the trained groups' samples, before shaping."),
    "reward/shaped_mean": Metric("reward", "Mean of the same rewards after shaping."),
    "reward/clipped_frac": Metric("share", "Share of the same rewards that shaping.clip changed."),
    "reward/kl_reference": Metric(
        "nats", "KL to the reference per token, in nats, with kl.location = reward or a moving coefficient."
    ),
    "reward/kl_coefficient": Metric("1", "Weight of that KL in the reward."),
    "reward/kl_clamped_frac": Metric("share", "Share of its tokens whose estimate was beyond 10 nats."),
    "group/generated": Metric("groups", "Groups that went through the filter in the step."),
    "group/kept": Metric("groups", "Groups that the filter kept."),
    "group/kept_frac": Metric("share", "Share of the groups that the filter kept."),
    "group/kept_frac/<domain>": Metric("share", "The same in one domain, where there are several."),
    "group/all_correct_frac": Metric(
        "share", "Share of the groups left out because every reward is at least 1."
    ),
    "group/all_wrong_frac": Metric(
        "share", "Share of the groups left out because every reward is at most 0."
    ),
    "group/no_spread_frac": Metric(
        "share", "Share of the groups left out because their rewards are equal, between 0 and 1."
    ),
    "group/mean_outside_frac": Metric(
        "share", "Share of the groups left out because their mean is outside filter.mean_range."
    ),
    "group/no_reward_frac": Metric("share", "Share of the groups left out because samples have no reward."),
    "group/resampled": Metric("groups", "Groups generated beyond loop.prompts_per_step."),
    "group/rounds": Metric("rounds", "Rounds of generation in the step."),
    "group/surplus": Metric("groups", "Groups kept beyond those the step needs; the next step trains them."),
    "group/short": Metric("groups", "Groups missing from the step."),
    "group/aged_frac": Metric(
        "share", "Share of the trained groups with tokens of an earlier version of the weights."
    ),
    "group/degenerate_samples_frac": Metric(
        "share", "Share of the trained samples whose group has equal shaped rewards: advantage 0."
    ),
    "rollout/samples": Metric("samples", "Samples generated for the step."),
    "rollout/groups": Metric("groups", "Groups that are trained."),
    "rollout/response_tokens_mean": Metric("tokens", "Mean response length in tokens."),
    "rollout/response_tokens_p99": Metric("tokens", "99th percentile of the response length in tokens."),
    "rollout/truncated_frac": Metric("share", "Share of the samples cut off at rollout.max_response_tokens."),
    "rollout/distinct_frac": Metric(
        "share", "Different responses over samples, mean over the groups generated for the step."
    ),
    "rollout/shared_run_frac": Metric(
        "share",
        "Share of 256 responses whose last 256 tokens have the run of 8 tokens that most of them have.",
    ),
    "rollout/aborted": Metric("samples", "Samples that were aborted."),
    "rollout/engines_lost": Metric(
        "1", "Engines that this start of the run has lost so far; in rows after the first loss."
    ),
    "rollout/engines": Metric("1", "Engines that serve; in the same rows."),
    "rollout/started_over": Metric(
        "samples",
        "Unfinished requests of lost engines and rollout workers that others began again, so far; in the same "
        "rows.",
    ),
    "rollout/workers_lost": Metric(
        "1", "Rollout workers that this start of the run has lost so far; in rows after the first loss."
    ),
    "rollout/failed": Metric("samples", "Samples whose generation failed."),
    "agent/episodes": Metric("samples", "Episodes generated for the step."),
    "agent/turns": Metric("1", "Mean number of the policy's turns in them."),
    "agent/env_seconds_p99": Metric(
        "s", "99th percentile of an environment's seconds for the answer to a turn."
    ),
    "agent/retries": Metric(
        "1", "Times that one of them began anew after a fault that the policy cannot have caused."
    ),
    "agent/restarted": Metric(
        "1", "Times that one of them began anew because a resumed run's environment said something else."
    ),
    "agent/ended_by/<end>": Metric(
        "samples", "Episodes that ended for this reason (mrl/agents/episode.py, EndedBy)."
    ),
    "stream/slots_used": Metric(
        "groups",
        "Groups on their way as the step took its own; a step whose result no engine serves counts as a batch.",
    ),
    "stream/waited": Metric(
        "1", "1 where the step's groups were not there when it asked for them, 0 where they were."
    ),
    "stream/wait_for_groups_seconds": Metric("s", "Seconds that the step waited for its groups."),
    "stream/segments_per_sample": Metric(
        "segments", "Mean number of segments of a trained sample; 1 is a response that no weight sync met."
    ),
    "stream/parked": Metric(
        "samples", "Responses interrupted by weight syncs since the step before took its groups."
    ),
    "stream/park_seconds": Metric("s", "Seconds until all engines had stopped, and to let them step again."),
    "stream/reprefill_tokens": Metric(
        "tokens", "Tokens of prompts and responses that engines compute again to continue them."
    ),
    "stream/held_by/<holder>": Metric(
        "share",
        "Share of waiting by what the next step's oldest unready group waited for; slots: all of them were ready.",
    ),
    "resume/undone_steps": Metric(
        "steps", "In the first row after a resume: steps that earlier attempts made and no checkpoint has."
    ),
    "resume/undone_prompts": Metric("prompts", "Prompts that those steps had trained; they come again."),
    "resume/dropped_samples": Metric("samples", "Rows of samples.jsonl of those steps, dropped."),
    "resume/dropped_groups": Metric(
        "groups", "Groups of the checkpoint with tokens of later versions than its weights, asked anew."
    ),
    "pool/bytes": Metric(
        "bytes", "Bytes of the judged groups that no served version is made of, as the step took its own."
    ),
    "pool/spilled_bytes": Metric("bytes", "Of these, those in files: beyond stream.pool.memory_bytes."),
    "advantage/token_mean": Metric("advantage", "Mean advantage over the trained tokens."),
    "advantage/sample_mean": Metric("advantage", "Mean over the samples of their tokens' mean advantage."),
    "advantage/abs_max": Metric("advantage", "Largest absolute advantage."),
    "distillation/divergence": Metric(
        "nats",
        "Divergence of policy and teacher a token that has a teacher: exact, or estimated from sampled tokens.",
    ),
    "distillation/loss": Metric("1", "The teachers' term of the objective, unless estimator is sampled."),
    "distillation/clipped_frac": Metric(
        "share", "Share of those tokens whose term distillation.clip changed, with estimator sampled."
    ),
    "distillation/taught_frac": Metric("share", "Share of the trained tokens that have a teacher."),
    "policy/loss": Metric("1", "The whole objective: policy loss, KL and entropy terms."),
    "policy/clip_frac_low": Metric(
        "share", "Share of the tokens whose ratio lies below the lower bound and acts there."
    ),
    "policy/clip_frac_high": Metric(
        "share", "Share of the tokens whose ratio lies above the upper bound and acts there."
    ),
    "policy/kl_old": Metric("nats", "KL of the old policy from the new one per token (k3), in nats."),
    "policy/ratio_mean": Metric("1", "Mean ratio of new to old probability over the tokens."),
    "policy/ratio_max": Metric("1", "Largest ratio."),
    "policy/empty_sequences": Metric("samples", "Sequences of the minibatch without a trained token."),
    "policy/entropy": Metric("nats", "Mean entropy per token at the sampling temperature, in nats."),
    "policy/kl_reference": Metric(
        "nats", "Mean KL to the reference per token, in nats, with kl.location = loss."
    ),
    "policy/kl_clamped_frac": Metric("share", "Share of its tokens whose estimate was beyond 10 nats."),
    "policy/kl_loss": Metric("1", "The KL term of the objective."),
    "policy/age_steps": Metric(
        "versions",
        "Largest age of a trained token: versions between the weights that produced it and today's.",
    ),
    "policy/aged_token_frac": Metric(
        "share", "Share of the trained tokens of an earlier version of the weights."
    ),
    "policy/age_mean": Metric(
        "versions", "Mean age of the trained tokens in versions, under loop.schedule = stream."
    ),
    "policy/age_frac/<age>": Metric("share", "Share of the trained tokens of one age."),
    "policy/ess/<age>": Metric(
        "share",
        "Effective sample size of the tokens of one age over their number, by w = exp(trained - sampled log-prob).",
    ),
    "policy/kl_behaviour/<age>": Metric(
        "nats",
        "KL of the trained policy from the one that sampled, over the tokens of one age (k3), in nats.",
    ),
    "policy/rollout_logprob_diff_max": Metric(
        "nats",
        "Largest |engine - trainer log-prob| of today's tokens outside router near-ties, where there are any.",
    ),
    "policy/rollout_logprob_diff_mean": Metric(
        "nats", "Mean |engine - trainer log-prob| of the same tokens."
    ),
    "policy/rollout_logprob_near_ties": Metric(
        "tokens", "Tokens left out of those two because a router's margin is below 1e-5."
    ),
    "policy/rollout_logprob_near_tie_diff_max": Metric(
        "nats", "Largest |engine - trainer log-prob| of the near-ties."
    ),
    "policy/rollout_mismatch_kl": Metric(
        "nats", "KL of the trainer from the engine per token (k3), in nats."
    ),
    "policy/rollout_difference": Metric(
        "nats", "Mean |log w| over the tokens, w = exp(old - engine log-prob)."
    ),
    "policy/rollout_difference_max": Metric("nats", "Largest |log w| of a token."),
    "policy/rollout_weight_token": Metric("1", "Mean w of a token."),
    "policy/rollout_weight_geometric": Metric(
        "1", "Mean over the tokens of their sequence's geometric mean of w."
    ),
    "policy/rollout_weight_product": Metric("1", "Mean over the tokens of their sequence's product of w."),
    "policy/correction_weight": Metric("1", "Mean weight that algorithm.correction gives a trained token."),
    "policy/correction_dropped_frac": Metric("share", "Share of the trained tokens whose weight is 0."),
    "policy/correction_gradient_frac": Metric(
        "share",
        "Norm of the policy loss's gradient with those weights over that without, estimated token by token.",
    ),
    "critic/explained_variance": Metric(
        "share", "Share of the returns' variance that the old values explain; 1 is all of it."
    ),
    "critic/clip_frac": Metric("share", "Share of the tokens whose value is clipped and acts there."),
    "critic/value_mean": Metric("reward", "Mean value over the tokens."),
    "critic/return_mean": Metric("reward", "Mean return over the tokens."),
    "critic/error_squared": Metric("reward^2", "Mean squared error of the values, without their clip."),
    "<optim|critic>/loss": Metric("1", "Loss of the updates of the policy (optim) or the critic."),
    "<optim|critic>/grad_norm": Metric("1", "Global gradient norm before clipping."),
    "<optim|critic>/lr": Metric("1", "Learning rate."),
    "<optim|critic>/optimizer_steps": Metric("steps", "Optimizer steps since the run began."),
    "<optim|critic>/skipped": Metric(
        "share",
        "Share of the updates that changed nothing: nothing to train on, or a number that is not finite.",
    ),
    "moe/load_max_over_mean": Metric(
        "1", "Tokens of the busiest expert over those of the mean expert, mean over layers; 1 is even."
    ),
    "moe/load_max_over_mean_max": Metric("1", "The same in the worst layer."),
    "moe/load_entropy": Metric(
        "1", "Entropy of the experts' shares over its largest value, mean over layers; 1 is even."
    ),
    "moe/load_entropy_min": Metric("1", "The same in the worst layer."),
    "moe/bias_range_max": Metric(
        "1", "Largest minus smallest correction bias of a layer, in the layer where that is most."
    ),
    "moe/layers/<layer>/load_max_over_mean": Metric("1", "The load of one layer, in expert_load.jsonl."),
    "moe/layers/<layer>/load_entropy": Metric("1", "The entropy of one layer, in expert_load.jsonl."),
    "routing/rows_missing": Metric(
        "1",
        "Rows of routes that engines did not record for the samples generated for the step, which failed.",
    ),
    "routing/agreement": Metric(
        "share",
        "Share of the experts given by routing.replay that the trainer's routers would have chosen, mean over layers.",
    ),
    "routing/agreement_min": Metric("share", "The same in the worst layer."),
    "sync/seconds": Metric("s", "Duration of the weight sync, as the driver sees it."),
    "sync/bytes": Metric("bytes", "Bytes moved to all engine ranks."),
    "sync/cross_slot_bytes": Metric("bytes", "Of these, what came from other slots."),
    "sync/whole_bytes": Metric(
        "bytes",
        "Of these, tensors that engine ranks took whole because their loaders do more than copy boxes.",
    ),
    "sync/wait_seconds": Metric("s", "Longest wait of an engine rank for its sender."),
    "sync/copy_seconds": Metric("s", "Longest copying on an engine rank."),
    "sync/load_seconds": Metric("s", "Longest loading into vLLM's parameters on an engine rank."),
    "sync/process_seconds": Metric("s", "Longest processing after loading on an engine rank."),
    "sync/move_seconds": Metric("s", "Longest packing, messages and unpacking on a trainer rank."),
    "sync/pack_seconds": Metric("s", "Of these, what the rank's own copies took."),
    "sync/commit_seconds": Metric("s", "Longest time from every rank's verification to every rank's commit."),
    "sync/prove_seconds": Metric(
        "s", "Longest digest of a trainer rank's own parameters (sync.verify = full)."
    ),
    "sync/sender_wait_seconds": Metric("s", "Longest wait of a trainer rank for its receivers."),
    "time/step_seconds": Metric("s", "Duration of the step without saving."),
    "time/<phase>_seconds": Metric(
        "s", "Duration of one phase: generate, reward, filter, recompute, estimate, update, save or sync."
    ),
    "time/validate_seconds": Metric("s", "Duration of the validation after the step."),
    "perf/tokens_per_second_per_device": Metric(
        "tokens/s", "Tokens of the trained samples, prompts included, per second of the step and device."
    ),
    "perf/<step or update>_flops_per_second_per_device": Metric(
        "FLOP/s", "Operations that the result needs, per second of the step or its updates (of a trainer's)."
    ),
    "perf/<step or update>_mfu": Metric(
        "share", "The same as a share of the device's peak; left out where the peak is unknown."
    ),
    "perf/driver_seconds": Metric(
        "s",
        "Seconds that the driver's main thread worked itself, and processor seconds of its rollout thread.",
    ),
    "perf/driver_frac": Metric("share", "The same as a share of the step."),
    "perf/driver_cpu_seconds": Metric("s", "Processor time of both threads in the step."),
    "mem/driver_bytes": Metric("bytes", "Resident memory of the driver."),
    "mem/gpu_free/<trainer|engine>/<phase>": Metric(
        "bytes", "Free bytes of the fullest GPU at the end of the phase, whoever holds the rest."
    ),
    "mem/gpu_reserved/<trainer|engine>/<phase>": Metric(
        "bytes", "Most bytes that torch's allocator of one process has of its GPU then."
    ),
    "mem/gpu_allocated/<trainer|engine>/<phase>": Metric(
        "bytes", "Most bytes of these in tensors; engines count what sleeps."
    ),
    "mem/gpu_peak/<trainer|engine>/<phase>": Metric(
        "bytes", "Most bytes that one process had in tensors since the end of the phase before."
    ),
    "mem/host_used/<trainer|engine>/<phase>": Metric(
        "bytes", "Resident memory of the largest process at the end of the phase."
    ),
    "mem/host_free/<trainer|engine>/<phase>": Metric("bytes", "Memory that the fullest host has left then."),
    "val/reward": Metric(
        "reward",
        "Mean greedy reward on the validation prompts; of a reward of several parts, that of the first.",
    ),
    "val/reward/<domain or tag>": Metric(
        "reward", "The same for one domain or tag, where there are several."
    ),
    "val/accuracy": Metric(
        "share",
        "The same number, if the reward is 0 or 1 by its kind: the share of correct greedy responses.",
    ),
    "val/accuracy/<domain or tag>": Metric(
        "share", "The same for one domain or tag, where there are several."
    ),
    "val/avg@<k>": Metric("reward", "Mean score of k samples per prompt."),
    "val/pass@<k>": Metric("share", "Share of the prompts that one of k samples answers right."),
    "val/prompts": Metric("prompts", "Validation prompts."),
    "val/no_reward": Metric("samples", "Greedy samples without a reward."),
    "val/loss": Metric("nats", "Of `mrl tune`: the validation rows' loss, sft's per token."),
    "val/rows": Metric("1", "Validation rows of `mrl tune`; a pair is one."),
    "val/preference/accuracy/<tag>": Metric(
        "share",
        "Validation pairs of one tag that are ordered as their labels say, where there are several tags.",
    ),
    "val/preference/<name>": Metric("1", "The figure of that name below, over the validation rows."),
    "preference/pair_loss": Metric("1", "The loss of pairs, without the chosen responses' own."),
    "preference/accuracy": Metric(
        "share",
        "Pairs, or labelled rows, whose implied rewards or scores are ordered as their labels say; ties half.",
    ),
    "preference/accuracy_<low|high>": Metric(
        "share",
        "The 95 % interval of the accuracy over so many pairs (Wilson); of a reward model, in validation.",
    ),
    "preference/center": Metric("1", "Of a reward model: the term that keeps scores around 0."),
    "preference/score_<mean|std>": Metric("reward", "Of all scores of a reward model, in validation."),
    "preference/margin_mean": Metric("reward", "Mean of chosen less rejected implied reward."),
    "preference/margin_square": Metric("reward^2", "Mean of its square."),
    "preference/reward_<chosen|rejected>": Metric(
        "reward", "Mean implied reward: beta times what the loss compares; of a reward model: its score."
    ),
    "preference/logp_chosen_per_token": Metric("nats", "Mean over chosen responses of their mean log-prob."),
    "preference/chosen_down_frac": Metric(
        "share", "Chosen responses that are less likely than under the reference (displacement)."
    ),
    "preference/noise": Metric(
        "reward",
        "At step 1, where policy and reference are the same: the spread of margins, which is rounding alone.",
    ),
    "preference/kto_z": Metric("nats", "The zero point of kto, over the step's mismatched responses."),
    "preference/margin_p10": Metric("reward", "The 10th percentile of the margin; in validation."),
    "preference/length_correlation": Metric(
        "1", "Correlation of margin and length difference; in validation."
    ),
    "preference/accuracy_shorter_chosen": Metric(
        "share", "Accuracy over pairs whose chosen response is the shorter; in validation."
    ),
    "val/steps": Metric("1", "Validation steps of a process reward model that have a label."),
    "val/process/<found_error|passed_right|f1>/<tag>": Metric(
        "share", "The same over the validation responses of one tag, where there are several tags."
    ),
    "val/process/<name>": Metric("1", "The figure of that name below, over the validation rows."),
    "process/step_loss": Metric("nats", "Mean over judged steps of what a step costs."),
    "process/accuracy": Metric(
        "share", "Judged steps whose score is on the side of 0 that their label says; ties half."
    ),
    "process/probability": Metric("share", "Mean probability of being right that judged steps are given."),
    "process/label": Metric("share", "Mean label of judged steps."),
    "process/found_error": Metric(
        "share", "Responses with a wrong step whose first one scores below 0 and none before; in validation."
    ),
    "process/passed_right": Metric(
        "share", "Responses without a wrong step in which no step scores below 0; in validation."
    ),
    "process/f1": Metric("share", "Harmonic mean of found_error and passed_right; in validation."),
    "tune/loss": Metric("1", "What a step of `mrl tune` minimises."),
    "tune/entropy": Metric("nats", "Mean entropy at trained tokens; of sft."),
    "tune/grad_norm": Metric("1", "Norm of the gradient before clipping."),
    "tune/lr": Metric("1", "Learning rate."),
    "tune/skipped": Metric("1", "1 where the update was skipped: something was not finite."),
    "tune/optimizer_steps": Metric("steps", "Updates so far."),
    "time/seconds": Metric("s", "Since this start of `mrl tune` began its steps."),
}
"""Name -> unit and meaning; <...> stands for a part of the name that differs. A row leaves out what does not apply to its step."""


def metrics_page() -> str:
    """docs/metrics.md: every metric, a heading for each first part of a name."""
    lines = [
        "# Metrics",
        "",
        "Made from the code by `make docs`. A step is one object of `metrics.jsonl` in the run's folder, which trackers take too;",
        "`<...>` stands for a part of the name that differs, and a row leaves out what does not apply to its step. Names ending in",
        "`_max` and `_min` are the largest and smallest of a step's updates, all others of `policy/`, `optim/` and `critic/` their mean.",
        "What begins with `time/`, `perf/` or `mem/` or names seconds depends on the machine; the rest is the same in every run of the",
        "same seed, configuration and machine where `loop.deterministic` is on.",
        "",
        "The unit stands in brackets: "
        + "; ".join(f"{unit}, {what}" for unit, what in UNITS.items() if what)
        + ".",
    ]
    for name, (unit, sentence) in METRICS.items():
        heading = f"## {name.partition('/')[0].strip('<>').replace('|', ', ')}"
        if heading not in lines:
            lines += ["", heading, ""]
        lines.append(f"- `{name}` [{unit}] {sentence}")
    return "\n".join(lines) + "\n"


@functools.cache
def pattern_of(name: str) -> re.Pattern[str]:
    """What matches a name of METRICS: one of its words for <a|b>, one part of a name for any other <...>."""
    parts = re.split(r"(<[^>]*>)", name)
    return re.compile("".join(_part(part) for part in parts))


def _part(part: str) -> str:
    if not part.startswith("<"):
        return re.escape(part)
    return f"({part[1:-1]})" if "|" in part else "[^/]+"


def with_todays_names(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with `val/reward` in place of the `val/accuracy` of earlier versions, which was the mean reward of any kind.

    >>> with_todays_names({"step": 3, "val/accuracy": 0.5, "val/accuracy/sums": 1.0})
    {'step': 3, 'val/reward': 0.5, 'val/reward/sums': 1.0}
    """
    if "val/accuracy" not in row or "val/reward" in row:
        return row
    former = re.compile("val/accuracy(?=/|$)")
    return {former.sub("val/reward", name): value for name, value in row.items()}


@functools.cache
def name_in_list(name: str) -> str | None:
    """The entry of METRICS that a row's name belongs to, one without a part that differs first; None where there is none.

    >>> name_in_list("time/sync_seconds"), name_in_list("reward/max"), name_in_list("nobody/knows")
    ('time/<phase>_seconds', 'reward/max', None)
    """
    if name in METRICS:
        return name
    return next((entry for entry in METRICS if pattern_of(entry).fullmatch(name)), None)


def undescribed(names: Iterable[str]) -> list[str]:
    """The names that are not in the list.

    >>> undescribed(["reward/mean", "time/sync_seconds", "reward/of/nobody"])
    ['reward/of/nobody']
    """
    return [name for name in names if name_in_list(name) is None]

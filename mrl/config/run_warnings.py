"""Warn about configurations that are valid but probably not intended."""

from __future__ import annotations

from mrl.config.root import Config


def warnings_of(config: Config) -> list[str]:
    """Return the warnings that a run's start and its capacity estimate print."""
    return [*_quantisation_warnings(config), *_learning_warnings(config)]


def _learning_warnings(config: Config) -> list[str]:
    warnings, longest = [], config.rollout.max_response_tokens
    for path, shaping in config.algorithm.shapings().items():
        if shaping.overlong is not None and shaping.overlong.max_tokens > longest:
            warnings.append(
                f"algorithm.{path}.overlong.max_tokens = {shaping.overlong.max_tokens} exceeds "
                f"rollout.max_response_tokens = {longest}: no response gets the full penalty; set it to "
                f"{longest}, and buffer_tokens below it"
            )
    if config.algorithm.minibatches > config.loop.prompts_per_step:
        warnings.append(
            f"algorithm.minibatches = {config.algorithm.minibatches} exceeds loop.prompts_per_step = "
            f"{config.loop.prompts_per_step}: a mini-batch is at least one group; set at most that many"
        )
    return warnings


def _quantisation_warnings(config: Config) -> list[str]:
    if config.rollout.quantization == "none":
        return []
    setting, warnings = f"rollout.quantization = {config.rollout.quantization}", []
    if config.algorithm.correction.kind == "off" and config.algorithm.old_logprobs != "rollout":
        warnings.append(
            f"{setting} with algorithm.correction.kind = off: the engine's probabilities differ from the "
            "trainer's by more than rounding, and nothing corrects for it; truncated is the usual choice"
        )
    if config.loop.max_rollout_mismatch is not None:
        warnings.append(
            f"{setting} with loop.max_rollout_mismatch = {config.loop.max_rollout_mismatch:g}: quantised "
            "weights alone cause differences of tenths and more; measure some steps without a limit first"
        )
    return warnings

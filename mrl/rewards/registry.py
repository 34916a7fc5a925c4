"""From configuration to verifier objects. Runs inside reward workers."""

from __future__ import annotations

from mrl.config.sections.reward import RewardPart
from mrl.errors import ConfigError
from mrl.rewards.contract import GroupVerifier, Verifier


def stages_of(part: RewardPart) -> tuple[str, ...]:
    """The kinds of work a verifier consists of, in order; a stage that answers None hands over to the next one."""
    if part.kind == "maths":
        return ("exact", "symbolic") if part.maths.symbolic else ("exact",)
    return ("whole",)


def keeps_deadline(part: RewardPart, stage: str) -> bool:
    """Whether the verifier ends overdue work itself: what a sample used up is its own verdict there."""
    return stage == "symbolic" or part.kind in ("code", "code_service")


def build_verifier(part: RewardPart, *, stage: str = "whole") -> Verifier | GroupVerifier:
    """The verifier of one stage. Raises ConfigError or RewardError for one that cannot be made."""
    if part.kind == "maths":
        from mrl.rewards.maths.verifier import ExactVerifier, SymbolicVerifier

        return SymbolicVerifier(part.maths) if stage == "symbolic" else ExactVerifier(part.maths)
    if part.kind == "code":
        from mrl.rewards.code.verifier import CodeVerifier

        return CodeVerifier(part.code)
    if part.kind == "code_service":
        from mrl.rewards.code.remote import CodeServiceVerifier

        return CodeServiceVerifier(part.path or "", part.code)
    if part.kind == "instructions":
        from mrl.rewards.instructions.verifier import InstructionVerifier

        return InstructionVerifier(part.instructions)
    if part.kind in ("format", "repetition"):
        from mrl.rewards.instructions.format import FormatVerifier, RepetitionVerifier

        return FormatVerifier(part.format) if part.kind == "format" else RepetitionVerifier(part.repetition)
    if part.kind == "plugin":
        from mrl.rewards.plugins.plugin import load_plugin

        return load_plugin(part)
    raise ConfigError(f"verifier kind {part.kind!r} is unknown")

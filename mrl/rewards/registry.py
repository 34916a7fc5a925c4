"""From configuration to judge objects. Runs inside judge processes."""

from __future__ import annotations

from mrl.config.sections.reward import JudgePart
from mrl.errors import ConfigError
from mrl.rewards.contract import GroupJudge, Judge


def stages_of(part: JudgePart) -> tuple[str, ...]:
    """The kinds of work a judge consists of, in order; a stage that answers None hands over to the next one."""
    if part.kind == "maths":
        return ("exact", "symbolic") if part.maths.symbolic else ("exact",)
    return ("whole",)


def keeps_deadline(part: JudgePart, stage: str) -> bool:
    """Whether the judge ends overdue work itself: what a sample used up is its own verdict there."""
    return stage == "symbolic" or part.kind in ("code", "code_service")


def build_judge(part: JudgePart, *, stage: str = "whole") -> Judge | GroupJudge:
    """The judge of one stage. Raises ConfigError or RewardError for one that cannot be made."""
    if part.kind == "maths":
        from mrl.rewards.maths.verifier import ExactJudge, SymbolicJudge

        return SymbolicJudge(part.maths) if stage == "symbolic" else ExactJudge(part.maths)
    if part.kind == "code":
        from mrl.rewards.code.verifier import CodeJudge

        return CodeJudge(part.code)
    if part.kind == "code_service":
        from mrl.rewards.code.remote import CodeServiceJudge

        return CodeServiceJudge(part.path or "", part.code)
    if part.kind == "instructions":
        from mrl.rewards.instructions.verifier import InstructionJudge

        return InstructionJudge(part.instructions)
    if part.kind in ("format", "repetition"):
        from mrl.rewards.instructions.format import FormatJudge, RepetitionJudge

        return FormatJudge(part.format) if part.kind == "format" else RepetitionJudge(part.repetition)
    if part.kind == "plugin":
        from mrl.rewards.plugins.plugin import load_plugin

        return load_plugin(part)
    raise ConfigError(f"judge kind {part.kind!r} is unknown")

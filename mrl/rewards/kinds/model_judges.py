"""Reward kinds `llm` and `reward_model`: models that judge, served at an address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.errors import DataError
from mrl.rewards.addresses import address_faults
from mrl.rewards.contract import RewardKind, RewardRequest, Stage, Verifier
from mrl.rewards.judges.judge_rules import LlmRules
from mrl.rewards.reward_part import RewardPart


class _ServedModel(RewardKind):
    """Base of the kinds that send requests to a model server."""

    has_engine = True
    stages = (Stage(one_process=True),)

    @classmethod
    def faults(cls, part: RewardPart) -> Iterator[str]:
        yield from super().faults(part)
        if (part.path is None) == (part.engine is None):
            yield f"kind = {part.kind} needs either path or engine; set exactly one"
        if part.path is not None:
            yield from address_faults(part.path)
        if part.engine is not None and part.server.tokenizer:
            yield "server.tokenizer excludes engine, which uses its own model's tokenizer; leave it out"

    @property
    def own_folder(self) -> Path | None:
        """Folder of the judge's cached responses; None without a run."""
        return None if self.folder is None else Path(self.folder)


class Llm(_ServedModel):
    """Language model that gives a verdict, behind an OpenAI-compatible server."""

    rules_section = LlmRules

    @property
    def needs_ground_truth(self) -> bool:  # type: ignore[override] a setting decides
        return self.rules.reference

    @property
    def is_binary(self) -> bool:
        return self.rules.verdict == "line" and set(self.rules.choices.values()) <= {0.0, 1.0}

    def parse_ground_truth(self, raw: Any, *, place: str) -> str:
        if not isinstance(raw, str | int | float):
            raise DataError(
                f"{place}: a judge's reference must be text or a number, not {type(raw).__name__}"
            )
        return str(raw)

    def right_response(self, ground_truth: Any) -> str | None:
        return str(ground_truth) if self.rules.reference else None

    def verifier(self, stage: Stage) -> Verifier:
        from mrl.rewards.judges.llm import LlmVerifier

        return LlmVerifier(self.part, self.rules, self.own_folder)

    def reading(self, request: RewardRequest) -> dict[str, str]:
        from mrl.rewards.judges.llm import question_preview

        return {"asked": question_preview(self.rules, self.part.server, request)}


class RewardModel(_ServedModel):
    """Sequence classifier behind vLLM's pooling server, whose labels are scores."""

    @classmethod
    def faults(cls, part: RewardPart) -> Iterator[str]:
        yield from super().faults(part)
        if not part.engine and not part.server.tokenizer:
            yield "kind = reward_model with path needs server.tokenizer; set it to the model's folder"

    def verifier(self, stage: Stage) -> Verifier:
        from mrl.rewards.judges.judge_cache import first_date
        from mrl.rewards.judges.reward_model_judge import ConversationEncoder, RewardModelVerifier

        conversation = ConversationEncoder(self.part.server.tokenizer or "", date=first_date(self.own_folder))
        return RewardModelVerifier(self.part, conversation, self.own_folder)

"""How responses are verified: which verifier for which domain, its rules, and the pool that runs
verifiers."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, create_model

from mrl.rewards.judges.judge_rules import EngineSection
from mrl.rewards.kinds.registry import KINDS
from mrl.rewards.reward_part import RewardPart
from mrl.section import Section


def _kinds_and_rules() -> type[RewardPart]:
    """A part with the names of all kinds, and a section for the rules of each that has some."""
    names: Any = Literal[tuple(KINDS)]
    fields: dict[str, Any] = {"kind": (names | None, Field(None, description="Which verifier."))}
    for name, kind in KINDS.items():
        if kind.rules_section is not Section:
            words = f"Rules of the kind {name}."
            fields[name] = (kind.rules_section, Field(kind.rules_section(), description=words))
    return create_model("KindsAndRules", __base__=RewardPart, **fields)


class KindPart(_kinds_and_rules()):
    """One verifier."""

    def faults(self) -> Iterator[str]:
        if self.kind is not None:
            yield from KINDS[self.kind].faults(self)


class RewardSpec(KindPart):
    """What rewards one domain: one verifier, or a weighted sum of several."""

    parts: tuple[KindPart, ...] = ()
    """Verifiers whose weighted values are added; kind is left out then."""

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.parts and self.kind is not None:
            yield "kind and parts exclude each other; put the verifier into parts"
        if any(part.kind is None for part in self.parts):
            yield "every one of parts needs a kind"
        if any(part.kind == "environment" for part in self.parts):
            yield (
                "kind = environment stands alone: its value is the sum over an episode's turns; what else is to count belongs "
                "into the environment"
            )
        names = [part.label for part in self.parts]
        if len(set(names)) != len(names):
            yield f"parts have the names {names}; give each its own name"
        parts = self.verifiers()
        if any(part.share < 1 and not part.is_witness for part in parts):
            yield "share below 1 is for a witness, a verifier among parts with weight 0; every sample needs the others"
        if any(part.gate is not None for part in parts):
            if all(part.gate is not None for part in parts):
                yield "gate: there is no other verifier that it could keep from being asked"
            if any(part.group for part in parts):
                yield "gate with group = true: a group is scored as a whole, whatever one of its samples passed"
        if all(part.is_witness for part in parts) and self.parts:
            yield "every one of parts has weight 0: nothing gives a reward"

    def verifiers(self) -> tuple[KindPart, ...]:
        """The verifiers whose weighted values make the reward."""
        return self.parts or (self,)


class RewardSection(RewardSpec):
    """The verifiers of a run and the pool of processes they work in."""

    domains: dict[str, RewardSpec] = {}
    """The verifier of each domain; a domain that is not named here has the verifier above."""
    engines: dict[str, EngineSection] = {}
    """Servers of models that judge, by the name that a verifier's `engine` says; the run starts and ends them."""
    workers: int = Field(default=2, ge=1)
    """Processes for each kind of work (in each rollout worker, if there are any)."""
    retries: int = Field(default=2, ge=0)
    """Further attempts after a verifier failed on a sample."""
    tasks_per_worker: int = Field(default=2000, ge=1)
    """A worker is replaced after so many pieces of work: a sample, a group, or a batch of cheap checks."""

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.kind is None and not self.parts and not self.domains:
            yield "needs kind (maths, code, instructions, format, plugin, ...), parts or domains"
        for domain, spec in self.domains.items():
            if spec.kind is None and not spec.parts:
                yield f"domains.{domain} needs kind or parts"
        asked: dict[str, set[str]] = {}
        for part in self.all_verifiers():
            if part.engine is not None:
                asked.setdefault(part.engine, set()).add(str(part.kind))
        if unknown := sorted(asked.keys() - self.engines.keys()):
            yield f"engine = {unknown[0]!r} is none of reward.engines, which has {sorted(self.engines)}"
        if idle := sorted(self.engines.keys() - asked.keys()):
            yield f"engines.{idle[0]} is asked by no verifier; remove it, or name it as a verifier's engine"
        if mixed := [name for name, kinds in asked.items() if len(kinds) > 1]:
            kinds = " and ".join(sorted(asked[mixed[0]]))
            yield f"engines.{mixed[0]} is asked as {kinds}; a server is one of them"

    def all_verifiers(self) -> list[KindPart]:
        """Every verifier of every domain."""
        own = [self] if self.kind is not None or self.parts else []
        return [part for spec in (*own, *self.domains.values()) for part in spec.verifiers()]

    def for_domain(self, domain: str) -> RewardSpec:
        """The verifier of a domain. Raises KeyError where there is none."""
        if domain in self.domains:
            return self.domains[domain]
        if self.kind is None and not self.parts:
            raise KeyError(
                f"reward.domains has no {domain!r} (it has {sorted(self.domains)}) and there is no default"
            )
        return self

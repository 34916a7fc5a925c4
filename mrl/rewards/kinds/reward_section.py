"""Settings of the section `reward`: the verifiers of each domain, their rules, and the reward pool."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, create_model

from mrl.rewards.judges.judge_rules import EngineSection
from mrl.rewards.kinds.registry import KINDS
from mrl.rewards.reward_part import RewardPart
from mrl.section import Section


def _kinds_and_rules() -> type[RewardPart]:
    """Return RewardPart with `kind` limited to known names and one rules section per kind that has rules."""
    names: Any = Literal[tuple(KINDS)]
    fields: dict[str, Any] = {"kind": (names | None, Field(None, description="Kind of verifier."))}
    for name, kind in KINDS.items():
        if kind.rules_section is not Section:
            description = f"Rules of the kind {name}."
            fields[name] = (kind.rules_section, Field(kind.rules_section(), description=description))
    return create_model("KindsAndRules", __base__=RewardPart, **fields)


class KindPart(_kinds_and_rules()):
    """One verifier."""

    def faults(self) -> Iterator[str]:
        if self.kind is not None:
            yield from KINDS[self.kind].faults(self)


class RewardSpec(KindPart):
    """Reward of one domain: one verifier, or a weighted sum of several."""

    parts: tuple[KindPart, ...] = ()
    """Add up the weighted values of these verifiers; leave out `kind` then."""

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.parts and self.kind is not None:
            yield "kind and parts exclude each other; put the verifier into parts"
        if any(part.kind is None for part in self.parts):
            yield "a verifier in parts has no kind; give each one a kind"
        if any(part.kind == "environment" for part in self.parts):
            yield (
                "kind = environment cannot be one of parts: its value is the sum over an episode's turns; "
                "put other rewards into the environment"
            )
        names = [part.label for part in self.parts]
        if len(set(names)) != len(names):
            yield f"parts have duplicate names {names}; give each a different name"
        parts = self.verifiers()
        if any(part.share < 1 and not part.is_audit for part in parts):
            yield "share below 1 needs weight = 0 and no gate (audit verifier): every sample needs the others"
        if any(part.reject_truncated and part.group for part in parts):
            yield "reject_truncated excludes group = true: the function scores a group as a whole"
        if any(part.reject_truncated and part.kind == "environment" for part in parts):
            yield "reject_truncated has no effect on kind = environment: the environment gives the rewards"
        if any(part.gate is not None for part in parts):
            if all(part.gate is not None for part in parts):
                yield "gate is set on every verifier, so it holds back none; leave one verifier without gate"
            if any(part.group for part in parts):
                yield "gate excludes group = true: a group is scored as a whole, whichever samples passed"
        if all(part.is_audit for part in parts) and self.parts:
            yield "every verifier in parts has weight 0, so nothing gives a reward; give one another weight"

    def verifiers(self) -> tuple[KindPart, ...]:
        """Return the verifiers whose weighted values make the reward."""
        return self.parts or (self,)


class RewardSection(RewardSpec):
    """Verifiers of a run, and the pool of processes that runs them."""

    domains: dict[str, RewardSpec] = {}
    """Verify each domain as named here, and every other domain by the verifier above."""
    engines: dict[str, EngineSection] = {}
    """Start and stop these judge servers with the run; a verifier's `engine` names one."""
    workers: int = Field(default=2, ge=1)
    """Start this many processes per kind of work (in each rollout worker, if there are any)."""
    retries: int = Field(default=2, ge=0)
    """Retry a sample this many times after its verifier failed."""
    tasks_per_worker: int = Field(default=2000, ge=1)
    """Replace a worker after this many tasks; a task is a sample, a group, or a batch of cheap checks."""

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.kind is None and not self.parts and not self.domains:
            yield "no verifier: set kind (maths, code, instructions, format, plugin, ...), parts or domains"
        for domain, spec in self.domains.items():
            if spec.kind is None and not spec.parts:
                yield f"domains.{domain} has no verifier; set its kind or parts"
        kinds_of: dict[str, set[str]] = {}
        for part in self.all_verifiers():
            if part.engine is not None:
                kinds_of.setdefault(part.engine, set()).add(str(part.kind))
        if unknown := sorted(kinds_of.keys() - self.engines.keys()):
            yield f"engine = {unknown[0]!r} is not in reward.engines ({sorted(self.engines)}); add it there"
        if idle := sorted(self.engines.keys() - kinds_of.keys()):
            yield f"engines.{idle[0]} is used by no verifier; remove it, or name it as a verifier's engine"
        if mixed := [name for name, kinds in kinds_of.items() if len(kinds) > 1]:
            kinds = " and ".join(sorted(kinds_of[mixed[0]]))
            yield f"engines.{mixed[0]} is used as {kinds}, but a server serves one kind; add a second engine"

    def all_verifiers(self) -> list[KindPart]:
        """Return every verifier of every domain."""
        default = [self] if self.kind is not None or self.parts else []
        return [part for spec in (*default, *self.domains.values()) for part in spec.verifiers()]

    def for_domain(self, domain: str) -> RewardSpec:
        """Return the reward of a domain. Raises KeyError if it has none."""
        if domain in self.domains:
            return self.domains[domain]
        if self.kind is None and not self.parts:
            raise KeyError(
                f"reward.domains has no {domain!r} (it has {sorted(self.domains)}) and there is no default"
            )
        return self

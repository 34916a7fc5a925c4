"""Every class of mistake that a verifier could make, through the reward pool of a run, as a table.

    python -m benchmarks.verifiers [--cases 1000] [--seed 0] [--classes "maths: units" instructions ...]

The cases are those of `benchmarks/verifier_cases`: right answers in many spellings, and wrong ones that are close.
Their ground truths are parsed as rows' are at load; seconds are those from the first sample handed in to the last
verdict, with the start of the reward workers. Misjudged cases follow the table; the exit code is 1 where there is one.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import pkgutil
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks import verifier_cases
from benchmarks.verifier_cases.case import Case, Generator, take
from benchmarks.verifier_cases.judged import agrees, ground_truth_of, part_of
from mrl.errors import RewardError
from mrl.rewards.kinds.registry import kind_of
from mrl.rewards.kinds.section import RewardSection
from mrl.rewards.pool.pool import RewardPool
from mrl.rewards.pool.trial import trial_sample
from mrl.samples import Prompt, Sample, Verdict

SHARES = {"code": 20, "code_service": 20}
"""Kinds whose cases each start processes have so many times fewer of them."""
SHOWN_CASES = 5
SECONDS_A_CASE = 30.0
HEADER = (
    "| class | cases | wrong rewarded | right punished | no reward | seconds |\n|---|---|---|---|---|---|"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What the pool said of one class."""

    name: str
    cases: Sequence[Case]
    verdicts: Sequence[Verdict]
    seconds: float

    def misjudged(self) -> list[tuple[Case, Verdict]]:
        """The cases without a reward, or with the wrong one."""
        pairs = zip(self.cases, self.verdicts, strict=True)
        return [(c, v) for c, v in pairs if v.value is None or not agrees(c, v.value)]

    def row(self) -> str:
        """A line of the table."""
        wrong = self.misjudged()
        unrewarded = sum(verdict.value is None for _, verdict in wrong)
        punished = sum(case.right and verdict.value is not None for case, verdict in wrong)
        rewarded = len(wrong) - unrewarded - punished
        counts = f"{len(self.cases):,} | {rewarded} | {punished} | {unrewarded}"
        return f"| {self.name} | {counts} | {self.seconds:.1f} |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifiers", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="of each class; of programs fewer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--classes", nargs="*", default=[""], help="those whose name holds one of these")
    options = parser.parse_args(arguments)
    chosen = {
        name: make for name, make in generators().items() if any(part in name for part in options.classes)
    }
    print(HEADER, flush=True)
    results = []
    for name, make in chosen.items():
        first = take(make, 1, seed=options.seed)[0]
        count = max(1, options.cases // SHARES.get(first.kind, 1))
        title = name if name.startswith(first.kind) else f"{first.kind}: {name}"
        results.append(run(title, take(make, count, seed=options.seed)))
        print(results[-1].row(), flush=True)
    for line in (line for result in results for line in _complaints(result)):
        print(line)
    return int(any(result.misjudged() for result in results))


def generators() -> dict[str, Generator]:
    """Every class of mistake and its generator, of every module of `benchmarks.verifier_cases`."""
    found: dict[str, Generator] = {}
    for module in pkgutil.walk_packages(verifier_cases.__path__, verifier_cases.__name__ + "."):
        found |= getattr(importlib.import_module(module.name), "GENERATORS", {})
    return dict(sorted(found.items()))


def run(name: str, cases: Sequence[Case]) -> Result:
    """Every case through a pool of its own class. Raises RewardError where a verdict does not come."""
    domains = {part_of(case).model_dump_json(): part_of(case) for case in cases}
    section = RewardSection.model_validate({"domains": {d: part.model_dump() for d, part in domains.items()}})
    pairs = [_pair(number, case) for number, case in enumerate(cases)]
    verdicts: dict[str, Verdict] = {}
    start = time.monotonic()
    allowed = start + 60.0 + SECONDS_A_CASE * len(cases)
    with RewardPool(section) as pool:
        pool.submit_all(pairs, deadline_seconds=allowed - start)
        while len(verdicts) < len(pairs):
            if time.monotonic() > allowed:
                raise RewardError(f"{name}: {len(pairs) - len(verdicts)} verdicts did not come")
            verdicts |= pool.collect(10.0)
        seconds = time.monotonic() - start
    return Result(name, cases, [verdicts[sample.sample_id] for sample, _ in pairs], seconds)


def _pair(number: int, case: Case) -> tuple[Sample, Prompt]:
    """The case as a sample of its own prompt."""
    part = part_of(case)
    prompt = Prompt(
        index=number,
        tokens=np.zeros(1, np.int32),
        text="",
        ground_truth=ground_truth_of(case, kind_of(part)),
        domain=part.model_dump_json(),
        row=f"{case.label}:{number}",
    )
    return trial_sample(prompt, case.response), prompt


def _complaints(result: Result) -> Iterator[str]:
    for case, verdict in result.misjudged()[:SHOWN_CASES]:
        right = "right" if case.right else "wrong"
        yield f"{result.name}, {case.label}, {right}: value {verdict.value}, {verdict.reason}"
        yield f"    {case.response[:300]!a} for {str(case.ground_truth)[:300]!a}"


if __name__ == "__main__":
    sys.exit(main())

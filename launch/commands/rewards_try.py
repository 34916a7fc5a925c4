"""`mrl rewards try`: what the rewards of a configuration give to responses whose worth is known, before a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from mrl.config.root import Config
from mrl.data.pick import first_rows
from mrl.launch.commands.rewards import tokenizer_of
from mrl.rewards.trials.probes import Finding, Probe, findings, judged, probes_of


def try_rewards(config: Config, *, num_rows: int, deadline_seconds: float) -> tuple[str, bool]:
    """The report on the first rows of each domain of the training data, and whether it holds no error.

    Raises DataError for a row that the loader refuses, RewardError past the deadline.
    """
    section, lines, is_good = config.reward, [], True
    rows = first_rows(config.data, section, tokenizer_of(config), count=num_rows)
    for domain, prompts in rows.items():
        if any(part.kind == "environment" for part in section.for_domain(domain).verifiers()):
            lines.append(f"domain {domain}: its environment gives the reward, turn by turn; not tried")
            continue
        began = time.monotonic()
        probes = judged(section, list(probes_of(section, prompts)), deadline_seconds=deadline_seconds)
        found = findings(probes)
        lines += _report(domain, len(prompts), probes, found, time.monotonic() - began)
        is_good = is_good and not any(finding.is_error for finding in found)
    return "\n".join(lines), is_good


def _report(
    domain: str, num_rows: int, probes: Sequence[Probe], found: Sequence[Finding], seconds: float
) -> Iterator[str]:
    yield f"domain {domain}: {num_rows} rows, {len(probes)} responses in {seconds:.1f} s"
    yield f"  {'response':<32} {'mean':>7} {'least':>7} {'most':>7}  without reward"
    for name in dict.fromkeys(probe.name for probe in probes):
        own = [probe for probe in probes if probe.name == name]
        values = [probe.value for probe in own if probe.value is not None]
        shown = (np.mean(values), min(values), max(values)) if values else ()
        yield f"  {name:<32} {' '.join(f'{v:7.3g}' for v in shown) or '-':<23}  {len(own) - len(values) or ''}".rstrip()
    if not any(probe.name == "right" for probe in probes):
        yield "  no verifier says what a right response is: those made of one were not tried"
    for finding in found:
        yield f"  {'ERROR' if finding.is_error else 'warning'}: {finding.text}"
    yield "  nothing to remark" if not found else f"  {sum(f.is_error for f in found)} errors"

"""`mrl rewards try`: what the rewards of a configuration give to responses whose worth is known, before a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mrl.config.root import Config
from mrl.data.pick import first_rows
from mrl.data.row_files import read_rows
from mrl.errors import DataError
from mrl.launch.commands.rewards import tokenizer_if_there
from mrl.rewards.kinds.ground_truth import right_response
from mrl.rewards.trials.probes import Probe, TrialFinding, findings, judged, probes_of
from mrl.rewards.trials.solutions import SOLUTION, passes, remark, solutions_of
from mrl.samples import Prompt


def try_rewards(
    config: Config, *, num_rows: int, deadline_seconds: float, right: str | None = None
) -> tuple[str, bool]:
    """The report on the first rows of each domain of the training data, and whether it holds no error.

    Args:
        right: where right responses are: a column of the rows, or a file of lines {"row", "response"}; by default verifiers say them, else
            they are the solutions of the rows that pass.

    Raises:
        DataError: a row that the loader refuses, or `right` has no right response.
        RewardError: past the deadline.
    """
    section, lines, is_good = config.reward, [], True
    rows = first_rows(config.data, section, tokenizer_if_there(config), count=num_rows)
    for domain, prompts in rows.items():
        if any(part.kind == "environment" for part in section.for_domain(domain).verifiers()):
            lines.append(f"domain {domain}: its environment gives the reward, turn by turn; not tried")
            continue
        began = time.monotonic()
        texts = [right_response(section, p) for p in prompts] if right is None else _given(prompts, right)
        solutions = [Probe(SOLUTION, p, text) for p in prompts for text in solutions_of(p)]
        solutions = judged(section, solutions, deadline_seconds=deadline_seconds) if solutions else []
        poor = remark(solutions, others_are_right=any(texts))
        if not any(texts):
            passing = {probe.prompt.index: probe.response for probe in solutions[::-1] if passes(probe)}
            texts = [passing.get(p.index) for p in prompts]
        probes = judged(section, list(probes_of(prompts, texts)), deadline_seconds=deadline_seconds)
        found = [*([poor] if poor else []), *findings(probes)]
        lines += _report(domain, len(prompts), [*solutions, *probes], found, time.monotonic() - began)
        is_function = any(part.kind == "plugin" for part in section.for_domain(domain).verifiers())
        if found and is_function and right is None and texts[0] is not None:
            lines.append(
                f"  rows' answers were tried as right responses ({texts[0][:60]!r} in the first row): if they are not, --right names right ones"
            )
        is_good = is_good and not any(finding.is_error for finding in found)
    return "\n".join(lines), is_good


def _given(prompts: Sequence[Prompt], right: str) -> list[str | None]:
    """The user's right responses; None for a row without one. DataError where no row has one."""
    if Path(right).is_file():
        by_row = {}
        for place, row in read_rows(right):
            if not {"row", "response"} <= row.keys():
                raise DataError(
                    f'{place}: a right response is {{"row": its number or file:line, "response": text}}'
                )
            by_row[str(row["row"])] = str(row["response"])
        found = [by_row.get(prompt.row, by_row.get(prompt.row.rpartition(":")[2])) for prompt in prompts]
    else:
        values = [prompt.metadata.get(right) for prompt in prompts]
        found = [value if isinstance(value, str) else None for value in values]
    if not any(found):
        columns = ", ".join(sorted(set().union(*(prompt.metadata for prompt in prompts))))
        raise DataError(
            f"--right {right}: no right response of these rows there; give a column of theirs ({columns}), or a file of lines "
            '{"row": its number or file:line, "response": text}'
        )
    return found


def _report(
    domain: str, num_rows: int, probes: Sequence[Probe], found: Sequence[TrialFinding], seconds: float
) -> Iterator[str]:
    yield f"domain {domain}: {num_rows} rows, {len(probes)} responses in {seconds:.1f} s"
    yield f"  {'response':<32} {'mean':>7} {'least':>7} {'most':>7}  without reward"
    for name in dict.fromkeys(probe.name for probe in probes):
        own = [probe for probe in probes if probe.name == name]
        values = [probe.value for probe in own if probe.value is not None]
        shown = (np.mean(values), min(values), max(values)) if values else ()
        yield f"  {name:<32} {' '.join(f'{v:7.3g}' for v in shown) or '-':<23}  {len(own) - len(values) or ''}".rstrip()
    if solutions := [probe for probe in probes if probe.name == SOLUTION]:
        yield f"  solutions of the rows: {sum(map(passes, solutions))} of {len(solutions)} pass"
    if not any(probe.name == "right" for probe in probes):
        yield "  no verifier says what a right response is: those made of one were not tried; --right names where some are"
    for finding in found:
        yield f"  {'ERROR' if finding.is_error else 'warning'}: {finding.text}"
    yield "  nothing to remark" if not found else f"  {sum(f.is_error for f in found)} errors"

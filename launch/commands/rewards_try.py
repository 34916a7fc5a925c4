"""`mrl rewards try`: score good and bad responses with the configured rewards, before a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mrl.config.root import Config
from mrl.data.find_row import first_rows
from mrl.data.row_files import read_rows
from mrl.errors import DataError
from mrl.launch.commands.rewards import tokenizer_if_there
from mrl.rewards.kinds.ground_truth import correct_response
from mrl.rewards.trials.probes import Probe, TrialFinding, findings, probes_of, score_probes
from mrl.rewards.trials.solutions import SOLUTION, finding_on_solutions, passes, solutions_of
from mrl.samples import Prompt


def try_rewards(
    config: Config, *, num_rows: int, deadline_seconds: float, right: str | None = None
) -> tuple[str, bool]:
    """Return the report on the first rows of each training domain, and True if it has no errors.

    Args:
        right: Source of correct responses: a column of the rows, or a file of lines {"row", "response"}. By
            default the verifiers give them, else they are the rows' solutions that pass.

    Raises:
        DataError: The loader rejects a row, or `right` has no correct response.
        RewardError: The deadline has passed.
    """
    section, lines, is_good = config.reward, [], True
    rows = first_rows(config.data, section, tokenizer_if_there(config), count=num_rows)
    for domain, prompts in rows.items():
        if any(part.kind == "environment" for part in section.for_domain(domain).verifiers()):
            lines.append(f"domain {domain}: not tried, its environment gives the reward turn by turn")
            continue
        start = time.monotonic()
        texts = [correct_response(section, p) for p in prompts] if right is None else _given(prompts, right)
        solutions = [Probe(SOLUTION, p, text) for p in prompts for text in solutions_of(p)]
        solutions = score_probes(section, solutions, deadline_seconds=deadline_seconds) if solutions else []
        poor = finding_on_solutions(solutions, others_are_right=any(texts))
        if not any(texts):
            passing = {probe.prompt.index: probe.response for probe in solutions[::-1] if passes(probe)}
            texts = [passing.get(p.index) for p in prompts]
        probes = score_probes(section, list(probes_of(prompts, texts)), deadline_seconds=deadline_seconds)
        remarks = [*([poor] if poor else []), *findings(probes)]
        lines += _report(domain, len(prompts), [*solutions, *probes], remarks, time.monotonic() - start)
        is_function = any(part.kind == "plugin" for part in section.for_domain(domain).verifiers())
        if remarks and is_function and right is None and texts[0] is not None:
            lines.append(
                f"  the rows' answers were tried as correct responses ({texts[0][:60]!r} in the first row); "
                "if they are not, give correct ones with --right"
            )
        is_good = is_good and not any(finding.is_error for finding in remarks)
    return "\n".join(lines), is_good


def _given(prompts: Sequence[Prompt], right: str) -> list[str | None]:
    """Return the user's correct responses, None for a row without one. Raises DataError if no row has one."""
    if Path(right).is_file():
        by_row = {}
        for place, row in read_rows(right):
            if not {"row", "response"} <= row.keys():
                raise DataError(f'{place} must be {{"row": row number or file:line, "response": text}}')
            by_row[str(row["row"])] = str(row["response"])
        responses = [by_row.get(prompt.row, by_row.get(prompt.row.rpartition(":")[2])) for prompt in prompts]
    else:
        values = [prompt.metadata.get(right) for prompt in prompts]
        responses = [value if isinstance(value, str) else None for value in values]
    if not any(responses):
        columns = ", ".join(sorted(set().union(*(prompt.metadata for prompt in prompts))))
        raise DataError(
            f"--right {right} has no correct response to these rows; give one of their columns ({columns}), "
            "or a file "
            'of lines {"row": row number or file:line, "response": text}'
        )
    return responses


def _report(
    domain: str, num_rows: int, probes: Sequence[Probe], remarks: Sequence[TrialFinding], seconds: float
) -> Iterator[str]:
    yield f"domain {domain}: {num_rows} rows, {len(probes)} responses in {seconds:.1f} s"
    yield f"  {'response':<32} {'mean':>7} {'least':>7} {'most':>7}  without reward"
    for name in dict.fromkeys(probe.name for probe in probes):
        named = [probe for probe in probes if probe.name == name]
        values = [probe.value for probe in named if probe.value is not None]
        shown = (np.mean(values), min(values), max(values)) if values else ()
        yield (
            f"  {name:<32} {' '.join(f'{v:7.3g}' for v in shown) or '-':<23}  "
            f"{len(named) - len(values) or ''}"
        ).rstrip()
    if solutions := [probe for probe in probes if probe.name == SOLUTION]:
        yield f"  solutions of the rows: {sum(map(passes, solutions))} of {len(solutions)} pass"
    if not any(probe.name == "right" for probe in probes):
        yield "  no verifier gives a correct response, so those derived from one were not tried; set --right"
    for finding in remarks:
        yield f"  {'ERROR' if finding.is_error else 'warning'}: {finding.text}"
    yield "  no remarks" if not remarks else f"  {sum(f.is_error for f in remarks)} errors"

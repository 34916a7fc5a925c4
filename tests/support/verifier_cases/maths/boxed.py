"""Cases with a boxed answer."""

from __future__ import annotations

from typing import Any

from tests.support.verifier_cases.case import Case


def boxed(answer: str, ground_truth: str, right: bool, label: str, **settings: Any) -> Case:
    """Return a case whose response is only the answer."""
    return Case(
        "maths", f"Therefore the answer is \\boxed{{{answer}}}.", ground_truth, right, label, settings
    )

"""Every metric that the code produces is described, and every description has a metric."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mrl.algorithms.filtering import Decision
from mrl.config.other_names import RENAMED_METRICS
from mrl.observe.metric_names import METRICS, metrics_page, name_in_list, undescribed

ROOT = Path(__file__).parents[3]
PREFIXES = tuple({name.partition("/")[0] + "/" for name in METRICS if not name.startswith("<")} | {"optim/"})
SOURCES = [file for folder in ("mrl", "launch") for file in (ROOT / folder).rglob("*.py")]
COMPOSED = {
    "group/x_frac",
    "sync/x",
    "reward/x",
    "mem/x/x",
    "mem/host_used/x/x",
    "tune/x",
    "val/x",
    "preference/x",
    "preference/reward_x",
}
"""f-strings whose last part is any name: filter decisions, sync reports, reward parts, memory, tuning."""
UNITS = {
    *("1", "share", "reward", "reward^2", "advantage", "nats", "tokens", "tokens/s", "samples", "groups"),
    *("prompts", "segments", "rounds", "steps", "versions", "s", "bytes", "FLOP/s"),
}
NOT_METRICS = {"policy/ess/", "moe/layers/", *RENAMED_METRICS, *RENAMED_METRICS.values()}
"""Texts with a metric's prefix that are not metrics, or no longer."""


def texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts of a file; a placeholder of an f-string becomes a word."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "x" for v in child.values)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        else:
            yield from texts(child)


def produced() -> set[str]:
    """Return metric names in the code: one-word texts with a metric's prefix."""
    words = {text for file in SOURCES for text in texts(ast.parse(file.read_text()))}
    return {
        text for text in words if re.fullmatch(r"[a-z]+/[\w@/]+", text) and text.startswith(PREFIXES)
    } - NOT_METRICS


def test_every_metric_in_the_code_has_a_sentence() -> None:
    names = produced() - COMPOSED | {f"group/{decision.value}_frac" for decision in Decision}
    assert len(names) > 60
    assert sorted(undescribed(names)) == []
    assert {name for name in names if name.startswith("reward/")} - {"reward/mean/x"} <= METRICS.keys()


def test_every_sentence_has_a_metric_in_the_code() -> None:
    code = "\n".join(
        file.read_text()
        for folder in ("mrl", "launch", "resharding")
        for file in (ROOT / folder).rglob("*.py")
    )
    last = {name: re.sub(r"^.*/|<.*>|(_seconds|_frac)$", "", name).strip("_@") for name in METRICS}
    assert [name for name, word in last.items() if word not in code] == []


def test_a_sentence_is_one() -> None:
    assert [
        name
        for name, (_, text) in METRICS.items()
        if not re.fullmatch(r"[A-Z0-9].*\.", text) or len(text) > 110
    ] == []


def test_every_line_of_the_page_is_read() -> None:
    assert len(METRICS) == metrics_page().count("\n- ") > 150


def test_units_are_known_and_agree_with_names_that_say_them() -> None:
    assert {metric.unit for metric in METRICS.values()} == UNITS
    units = {"seconds": "s", "_frac": "share", "bytes": "bytes"}
    ends = {name: unit for name in METRICS for word, unit in units.items() if name.endswith(word)}
    assert len(ends) > 30
    assert {name for name, unit in ends.items() if METRICS[name].unit != unit} == set()


def test_an_entry_of_the_whole_name_comes_before_one_with_a_part_that_differs() -> None:
    assert name_in_list("reward/no_reward") == "reward/no_reward"
    assert name_in_list("reward/correctness") == "reward/<part>"
    assert name_in_list("val/reward/maths") == "val/reward/<domain or tag>"
    assert name_in_list("val/accuracy/maths") == "val/accuracy/<domain or tag>"

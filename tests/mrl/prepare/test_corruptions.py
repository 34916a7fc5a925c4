"""Worse responses are worse in the way that their name says."""

from __future__ import annotations

import random
import re

from mrl.prepare.corruptions import corrupted

OTHERS = ["\\boxed{7}", "\\boxed{30}", "\\boxed{512}"]


def test_each_is_what_its_name_says() -> None:
    right = "3 + 9 is \\boxed{12}"
    for seed in range(50):
        found = corrupted(right, [*OTHERS, right], random.Random(seed))
        assert set(found) == {
            "off by one",
            "another digit",
            "cut off",
            "another row",
            "all answers",
            "with a doubt",
        }
        assert found["off by one"] in ("3 + 9 is \\boxed{11}", "3 + 9 is \\boxed{13}")
        other = found["another digit"]
        assert len(other) == len(right) and sum(a != b for a, b in zip(other, right, strict=True)) == 1
        assert not any(number[0] == "0" and len(number) > 1 for number in re.findall(r"\d+", other))
        assert right.startswith(found["cut off"]) and found["another row"] in OTHERS
        assert sorted(found["all answers"].split("\n")) == sorted([*OTHERS, right])
        assert found["with a doubt"].startswith(f"{right}\n")


def test_what_cannot_be_made_is_left_out() -> None:
    assert corrupted("x", [], random.Random(0)) == {}
    assert set(corrupted("0", ["0"], random.Random(0))) == {"off by one", "another digit"}
    assert corrupted("0", [], random.Random(1))["off by one"] == "1"
    assert set(corrupted("no", ["yes"], random.Random(0))) == {
        "cut off",
        "another row",
        "all answers",
        "with a doubt",
    }

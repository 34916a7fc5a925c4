"""The figures of docs/design/training.md: the largest difference of a log-prob, by family and layout.

python -m pytest tests/mrl/training/test_family_matrix.py -k trains -m "" --junitxml=gaps.xml
python -m tests.mrl.training.gaps gaps.xml ...
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from xml.etree import ElementTree

GAP = "largest difference of a log-prob from transformers"
"""The property under which a test records it."""
CASE = re.compile(r"\[(\w+)-([\w-]+)\]$")


def table(files: Iterable[str]) -> str:
    """Markdown, a row for each family, of the reports of one or more runs."""
    found: dict[str, dict[str, float]] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            name = CASE.search(case.get("name", ""))
            for item in case.iter("property"):
                if name and item.get("name") == GAP:
                    found.setdefault(name[1], {})[name[2]] = float(item.get("value", "nan"))
    layouts = list(dict.fromkeys(layout for row in found.values() for layout in row))
    rows = [
        [family, *(f"{row[layout]:.1e}" if layout in row else "" for layout in layouts)]
        for family, row in found.items()
    ]
    lines = [["", *layouts], ["---"] * (len(layouts) + 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(table(sys.argv[1:]))

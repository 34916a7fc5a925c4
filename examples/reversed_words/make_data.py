"""Own data: short words and their reversals as jsonl rows, whose column names config.yaml maps.

python examples/reversed_words/make_data.py FOLDER
"""

import itertools
import json
import random
import sys
from pathlib import Path

LETTERS = "abcdef"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = ["".join(letters) for letters in itertools.product(LETTERS, repeat=3)]
    random.Random(0).shuffle(words)
    for name, part in (("train", words[:180]), ("validation", words[180:])):
        rows = [{"word": f"{word}>", "reversed": word[::-1]} for word in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{folder}/{name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

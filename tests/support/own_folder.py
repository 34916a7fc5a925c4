"""A user's folder with modules named like Python's own; importing any of them is an error."""

from pathlib import Path

NAMED_AS_PYTHONS = ("inspect", "profile", "queue", "select", "token")


def write_modules_named_as_pythons(folder: Path) -> None:
    for name in NAMED_AS_PYTHONS:
        (folder / f"{name}.py").write_text(f"raise ImportError('this is not Python\\'s {name}')\n")

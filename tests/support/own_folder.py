"""A user's folder in which modules are named as Python's own: each is an error to import."""

from pathlib import Path

NAMED_AS_PYTHONS = ("inspect", "profile", "queue", "select", "token")


def write_modules_named_as_pythons(folder: Path) -> None:
    for name in NAMED_AS_PYTHONS:
        (folder / f"{name}.py").write_text(f"raise ImportError('this is not Python\\'s {name}')\n")

"""Break good files by a seed: the same seed breaks the same file alike.

    Mutator("data-17").spoil(path, "lines")

changes the file in place and lists the changes in `told`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("nan"),
    float("inf"), -float("inf"), "", " ", "nan", "1e400", "\0", "\x1b[2J", "\ud800", "\u202e", "ü" * 300,
    "x" * 70_000, "../..", "[", "{", "0-99999999999", "-", "1_0", "2001-02-30", "0x", "~", "=", "<<", "*a",
    "&a", "!!python/object:os.system", "%s{}", [], {}, [[]], [None], [{}], {"": None}, {"a": {}}, [1, "a"],
    {"role": "user"}, [{"role": "user", "content": None}], [{"type": "image"}],
)  # fmt: skip
"""Values of unexpected types."""
LITERALS = (
    "9" * 5000, "1e999999", "-", "NaN", "Infinity", "0x10", "1_000", "2001-02-30", "!!int a", "*nobody", "\t",
    "{,}", "nul",
)  # fmt: skip
"""Texts that replace a value verbatim."""
INSERTED = (
    b"\xef\xbb\xbf", b"\0", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\n", b"\r", b'"', b"\\", b"{", b"]",
    b",", b"\x1a", b"\x85", b"\xe2\x80\xa8",
)  # fmt: skip
DEPTHS = (30, 900, 5_000, 200_000)
"""Numbers of nested brackets."""
_MARK = "mark of a mutation"


class Mutator:
    def __init__(self, seed: str) -> None:
        self._dice = random.Random(seed)
        self.told: list[str] = []
        """The changes, in order."""

    def spoil(self, path: Path, form: str, *, places: bool = True) -> None:
        """Break a file (lines, json, yaml, csv or bytes); `places`: it may also vanish or be replaced."""
        if places and self._dice.random() < 0.08:
            self._do(PLACES, path)
            return
        for _ in range(self._dice.choice((1, 1, 1, 2, 3))):
            kinds = BYTES if form == "bytes" or self._dice.random() < 0.4 else _OF_FORM[form]
            path.write_bytes(self._do(kinds, path.read_bytes()))

    def choose[T](self, things: list[T]) -> T:
        return self._dice.choice(things)

    def _do(self, kinds: tuple[Callable[..., Any], ...], thing: Any) -> Any:
        kind = self._dice.choice(kinds)
        self.told.append(kind.__name__)
        return kind(thing, self._dice)


# -- bytes ---------------------------------------------------------------------------------------------------


def cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def emptied(data: bytes, dice: random.Random) -> bytes:
    return dice.choice((b"", b"\n", b" \n\n", b"\0" * len(data)))


def bits_flipped(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 4, 40)) if data else 0):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def doubled(data: bytes, dice: random.Random) -> bytes:
    a, b = _span(data, dice)
    return data[:b] + data[a:]


def taken_out(data: bytes, dice: random.Random) -> bytes:
    a, b = _span(data, dice)
    return data[:a] + data[b:]


def swapped(data: bytes, dice: random.Random) -> bytes:
    a, b = _span(data, dice)
    middle = (a + b) // 2
    return data[:a] + data[middle:b] + data[a:middle] + data[b:]


def put_in(data: bytes, dice: random.Random) -> bytes:
    at = dice.choice((0, len(data), dice.randrange(len(data) + 1)))
    return data[:at] + dice.choice(INSERTED) + data[at:]


def ends_changed(data: bytes, dice: random.Random) -> bytes:
    return data.replace(b"\n", dice.choice((b"\r\n", b"\r", b"\n\n", b"\0\n", b"")))


def encoded_otherwise(data: bytes, dice: random.Random) -> bytes:
    text = data.decode("utf-8", "replace").replace("a", "ä")
    return text.encode(
        dice.choice(("utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig", "cp1252")), "replace"
    )


def archived(data: bytes, dice: random.Random) -> bytes:
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    return dice.choice((gzip.compress(data), gzip.compress(b""), empty.getvalue()))


def _span(data: bytes, dice: random.Random) -> tuple[int, int]:
    a, b = sorted(dice.randrange(len(data) + 1) for _ in "ab")
    return a, min(b, a + dice.choice((1, 8, 100, 10_000)))


# -- structure -----------------------------------------------------------------------------------------------


def strange_value(tree: Any, dice: random.Random) -> str | Any:
    holder, key = _place(tree, dice)
    holder[key] = dice.choice(STRANGE)
    return tree


def literal(tree: Any, dice: random.Random) -> tuple[Any, str]:
    holder, key = _place(tree, dice)
    holder[key] = _MARK
    return tree, dice.choice(LITERALS)


def nested(tree: Any, dice: random.Random) -> tuple[Any, str]:
    holder, key = _place(tree, dice)
    depth, (left, right) = dice.choice(DEPTHS), dice.choice(("[]", ('{"a":', "1}"), ("[{}, ", "]")))
    holder[key] = _MARK
    return tree, left * depth + right * depth


def left_out(tree: Any, dice: random.Random) -> Any:
    holder, key = _place(tree, dice)
    del holder[key]
    return tree


def renamed(tree: Any, dice: random.Random) -> Any:
    holder, key = _place(tree, dice)
    if isinstance(holder, dict):
        holder[dice.choice((f"{key}s", f" {key}", key[1:], key.upper(), "", "a.b", "ü"))] = holder.pop(key)
    else:
        holder.insert(key, holder[key])
    return tree


def exchanged(tree: Any, dice: random.Random) -> Any:
    (one, a), (other, b) = _place(tree, dice), _place(tree, dice)
    held = one[a]
    one[a] = json.loads(json.dumps(other[b]))
    if b in other if isinstance(other, dict) else b < len(other):
        other[b] = json.loads(json.dumps(held))
    return tree


def _place(tree: Any, dice: random.Random) -> tuple[Any, Any]:
    """Choose a value; return (its container, its key)."""
    return dice.choice(list(_places({"": tree} if not isinstance(tree, dict | list) or not tree else tree)))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


VALUES = (strange_value, strange_value, literal, nested, left_out, renamed, exchanged)


def json_changed(data: bytes, dice: random.Random) -> bytes:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return bits_flipped(data, dice)
    changed = dice.choice(VALUES)(tree, dice)
    tree, text = changed if isinstance(changed, tuple) else (changed, "")
    return json.dumps(tree).replace(json.dumps(_MARK), text).encode()


def key_doubled(data: bytes, dice: random.Random) -> bytes:
    keys = list(re.finditer(rb'"\w+": ', data))
    if not keys:
        return data
    key = dice.choice(keys)
    return data[: key.start()] + key[0] + dice.choice((b"0, ", b'"other", ', b"[], ")) + data[key.start() :]


def line_changed(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    at = dice.randrange(len(lines))
    kind = dice.choice((json_changed, json_changed, json_changed, key_doubled, cut, bits_flipped))
    lines[at] = kind(lines[at].rstrip(b"\n"), dice) + b"\n"
    return b"".join(lines)


def lines_moved(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    a, b = (dice.randrange(len(lines)) for _ in "ab")
    kind = dice.choice(("swap", "double", "join", "object", "text"))
    if kind == "swap":
        lines[a], lines[b] = lines[b], lines[a]
    elif kind == "double":
        lines.insert(a, lines[b])
    else:
        other = {"join": lines[a].rstrip() + lines[b], "object": b"[1, 2]\n", "text": b"no row\n"}[kind]
        lines[a] = other
    return b"".join(lines)


def yaml_changed(data: bytes, dice: random.Random) -> bytes:
    try:
        tree = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError):
        return bits_flipped(data, dice)
    if not isinstance(tree, dict) or not tree:
        return data + b"\nloop: [\n"
    kinds = (strange_value, strange_value, literal, nested, left_out, renamed)
    changed = dice.choice(kinds)(tree, dice)
    tree, text = changed if isinstance(changed, tuple) else (changed, "")
    written = yaml.safe_dump(tree, allow_unicode=False, width=10**6, sort_keys=False)
    return written.replace(_MARK, text).encode()


def yaml_word(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b"\n"]
    at = dice.randrange(len(lines))
    key = re.match(rb"(\s*)([\w.]+):", lines[at])
    indent, name = (key[1], key[2]) if key else (b"", b"run")
    words = (
        b"? [a, b]\n: 1\n", b"<<: {steps: 1}\n", name + b": &a [*a]\n", name + b": &a {b: *a}\n", b"---\n",
        name + b": 1\n", name + b": {a: 1, a: 2}\n", name + b": [{a: 1, a: 2}]\n",
        name + b": [{? [1] : 2}]\n", name + b": !!set {a}\n", name + b": !!binary x\n",
        name + b": !!timestamp x\n", name + b": [!!int x]\n", b"%YAML 9.9\n", b"\t- a\n", name + b": |\n",
        name + b": 2001-02-30\n", name + b": 190:20:30.15\n", _LAUGHS, _LAUGHS + name + b": *a39\n",
    )  # fmt: skip
    lines.insert(at, indent + dice.choice(words))
    return b"".join(lines)


_LAUGHS = b"a0: &a0 [lol, lol]\n" + b"".join(
    b"a%d: &a%d [*a%d, *a%d, *a%d]\n" % (n, n, n - 1, n - 1, n - 1) for n in range(1, 40)
)
"""References to references: one page that expands to more values than fit in memory."""


def csv_changed(data: bytes, dice: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    at = dice.randrange(len(lines))
    cells = lines[at].split(b",")
    cell = dice.randrange(len(cells))
    kind = dice.choice(("quote", "more", "fewer", "name", "value", "field"))
    if kind == "quote":
        cells[cell] = b'"' + cells[cell]
    elif kind == "more":
        cells.insert(cell, b"more")
    elif kind == "fewer":
        del cells[cell]
    else:
        cells[cell] = {
            "name": cells[0],
            "value": str(dice.choice(STRANGE)).encode("utf-8", "surrogatepass"),
            "field": b"x" * 200_000,
        }[kind]
    lines[at] = b",".join(cells)
    return b"".join(lines)


# -- the place of a file -------------------------------------------------------------------------------------


def gone(path: Path, dice: random.Random) -> None:
    path.unlink()


def a_folder(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.mkdir()
    if dice.random() < 0.5:
        (path / path.name).write_bytes(b"{}\n")


def a_link(path: Path, dice: random.Random) -> None:
    path.unlink()
    path.symlink_to(dice.choice(("/nowhere/file", path.name, "/dev/null", "/dev/zero", "/", "..")))


def a_pipe(path: Path, dice: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def not_to_be_read(path: Path, dice: random.Random) -> None:
    """Root can still read it."""
    path.chmod(0)


PLACES = (gone, a_folder, a_link, a_pipe, not_to_be_read)
BYTES = (
    cut, emptied, bits_flipped, bits_flipped, doubled, taken_out, swapped, put_in, ends_changed,
    encoded_otherwise, archived,
)  # fmt: skip
_OF_FORM: dict[str, tuple[Callable[[bytes, random.Random], bytes], ...]] = {
    "lines": (line_changed, line_changed, line_changed, lines_moved),
    "json": (json_changed, json_changed, key_doubled),
    "yaml": (yaml_changed, yaml_changed, yaml_word),
    "csv": (csv_changed,),
}


def copied(source: Path, target: Path) -> Path:
    if source.is_dir():
        return Path(shutil.copytree(source, target, symlinks=True))
    return Path(shutil.copy(source, target))

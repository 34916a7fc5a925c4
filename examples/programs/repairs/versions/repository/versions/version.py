"""A semantic version: MAJOR.MINOR.PATCH-PRERELEASE+BUILD (semver.org, 2.0.0)."""

from __future__ import annotations

import functools
import re

_FORM = re.compile(
    r"(?P<major>0|[1-9]\d*)\.(?P<minor>0|[1-9]\d*)\.(?P<patch>0|[1-9]\d*)"
    r"(?:-(?P<pre>[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?"
    r"(?:\+(?P<build>[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?"
)


@functools.total_ordering
class Version:
    """A version, ordered by precedence; build metadata does not count."""

    def __init__(self, text: str) -> None:
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not a version: {text!r}")
        self.major, self.minor, self.patch = (int(match[name]) for name in ("major", "minor", "patch"))
        self.pre = tuple(match["pre"].split(".")) if match["pre"] else ()
        self.build = match["build"] or ""
        for part in self.pre:
            if part.isdigit() and len(part) > 1 and part[0] == "0":
                raise ValueError(f"not a version: {text!r} (a number starts with 0)")

    @property
    def release(self) -> tuple[int, int, int]:
        """Return the three numbers."""
        return self.major, self.minor, self.patch

    @property
    def is_prerelease(self) -> bool:
        """Return True if the version comes before its release."""
        return bool(self.pre)

    def next_major(self) -> Version:
        """Return the first version that may break users of this one."""
        if self.major:
            return Version(f"{self.major + 1}.0.0")
        return self.next_minor() if self.minor else Version(f"0.0.{self.patch + 1}")

    def next_minor(self) -> Version:
        """Return the next version with new functions."""
        return Version(f"{self.major}.{self.minor + 1}.0")

    def _key(self) -> tuple[object, ...]:
        return self.release, not self.pre, self.pre

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self._key() == other._key()

    def __lt__(self, other: Version) -> bool:
        return self._key() < other._key()

    def __hash__(self) -> int:
        return hash((self.release, self.pre))

    def __str__(self) -> str:
        pre = f"-{'.'.join(self.pre)}" if self.pre else ""
        build = f"+{self.build}" if self.build else ""
        return f"{self.major}.{self.minor}.{self.patch}{pre}{build}"

    def __repr__(self) -> str:
        return f"Version('{self}')"

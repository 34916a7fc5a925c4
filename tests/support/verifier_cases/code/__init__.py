"""Cases of the code verifier: programs in many styles, and close incorrect ones and cheats."""

from __future__ import annotations

from tests.support.verifier_cases.case import Generator
from tests.support.verifier_cases.code.exceptions import exceptions
from tests.support.verifier_cases.code.fences import fences
from tests.support.verifier_cases.code.values import values

GENERATORS: dict[str, Generator] = {
    "code: exceptions": exceptions,
    "code: fences": fences,
    "code: values": values,
}

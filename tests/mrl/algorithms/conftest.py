"""Golden numbers, and random batches in both layouts.

golden.json has inputs and independently computed expected values (numpy, float64), compared with OpenRLHF,
ROLL, TRL, verl and PRIME.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

_CASES = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))


@dataclasses.dataclass(frozen=True)
class Golden:
    """One case, in the dtype and tolerance of the current parametrisation."""

    inputs: dict[str, Any]
    params: dict[str, Any]
    expected: dict[str, Any]
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        return 1e-9 if self.dtype == torch.float64 else 1e-5

    def tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=self.dtype)

    def check(self, actual: Tensor, expected: Any) -> None:
        wanted = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(actual.detach().double(), wanted, atol=self.tolerance, rtol=self.tolerance)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def golden(request: pytest.FixtureRequest) -> Callable[[str], Golden]:
    """Return a function: golden("A01") is that case in the parametrised precision."""

    def case(name: str) -> Golden:
        fields = _CASES[name]
        return Golden(fields["inputs"], fields["params"], fields["expected"], request.param)

    return case


@dataclasses.dataclass(frozen=True)
class Batch:
    """B ragged sequences with holes, padded [B, T] or packed [N]."""

    arrays: dict[str, Tensor]
    mask: Tensor
    group_ids: Tensor
    segment_ids: Tensor | None = None

    def packed(self, order: list[int] | None = None) -> "Batch":
        """Pack rows `order` (default: all), each cut after its last masked-in token (at least one token)."""
        rows = list(range(len(self.mask))) if order is None else order
        ends = [max(1, int(self.mask[r].nonzero().max()) + 1 if self.mask[r].any() else 1) for r in rows]

        def take(values: Tensor) -> Tensor:
            return torch.cat([values[r, :e] for r, e in zip(rows, ends, strict=True)])

        ids = torch.arange(len(rows)).repeat_interleave(torch.tensor(ends))
        arrays = {name: take(values) for name, values in self.arrays.items()}
        return Batch(arrays, take(self.mask), self.group_ids[rows], ids)

    def rows(self, order: list[int]) -> "Batch":
        """Return the same rows in another order, still padded."""
        arrays = {name: values[order] for name, values in self.arrays.items()}
        return Batch(arrays, self.mask[order], self.group_ids[order])


@pytest.fixture
def batch() -> Batch:
    """12 sequences in 4 groups of 1, 2, 4 and 5, ragged, with holes; row 3 has no policy token."""
    generator = torch.Generator().manual_seed(7)

    def random(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(12, 9, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([9, 4, 7, 5, 1, 9, 6, 8, 3, 2, 9, 5])
    mask = (torch.arange(9)[None] < lengths[:, None]) & (random(0, 1) > 0.25)
    mask[3] = False
    mask[4, 0] = True
    old = random(-3, 0)
    arrays = {
        "old_logprobs": old,
        "logprobs": old + random(-0.5, 0.5),
        "rollout_logprobs": old + random(-0.3, 0.3),
        "ref_logprobs": old + random(-0.8, 0.8),
        "advantages": random(-2, 2),
        "token_rewards": random(-1, 1),
        "values": random(-1, 1),
        "entropy": random(0, 2),
        "returns": random(-1, 1),
    }
    groups = torch.tensor([40, 7, 7, 3, 3, 3, 3, 9, 9, 9, 9, 9])
    return Batch(arrays, mask, groups)

"""Finds tensors in what holds them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors inside dataclasses, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)

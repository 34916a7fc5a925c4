"""What every public function of this room checks on entry: names, shapes, dtypes, finiteness.

Owns the wording of the refusals. Messages name the argument, and the sample where a value is at fault.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mrl.algorithms.segments import Segments


def known(name: str, names: Iterable[str], what: str) -> None:
    """Raises ValueError naming the known names, the nearest first, unless `name` is one of them."""
    names = sorted(names)
    if name in names:
        return
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise ValueError(f"unknown {what} '{name}': {hint}known: {', '.join(names)}")


def mask(name: str, values: Tensor) -> Tensor:
    """The mask as bool; a float or int mask may hold only 0 and 1."""
    if values.dtype == torch.bool:
        return values
    if not bool(((values == 0) | (values == 1)).all()):
        raise ValueError(
            f"{name}: a mask holds only 0 and 1, found {values[(values != 0) & (values != 1)][0].item()}"
        )
    return values.to(torch.bool)


def per_token(arrays: Mapping[str, Tensor | None], mask: Tensor, segments: Segments) -> dict[str, Tensor]:
    """Flat [N] tensors with 0 where the mask is False, so that whatever stood there has no effect.

    Raises TypeError for anything but float32 and float64, ValueError for another shape than the mask's and for NaN
    or infinity on a masked-in token (with the index of its sample). Absent (None) arrays are left out.
    """
    keep = segments.flat(mask)
    return {
        name: _token_array(name, values, keep, segments)
        for name, values in arrays.items()
        if values is not None
    }


def _token_array(name: str, values: Tensor, keep: Tensor, segments: Segments) -> Tensor:
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name}: dtype {values.dtype}, expected float32 or float64")
    if values.shape != segments.shape:
        raise ValueError(
            f"{name}: shape {tuple(values.shape)}, expected that of loss_mask {tuple(segments.shape)}"
        )
    flat = segments.flat(values).masked_fill(~keep, 0.0)
    finite = torch.isfinite(flat.detach())
    if not bool(finite.all()):
        position = int((~finite).nonzero()[0, 0])
        raise ValueError(
            f"{name}: {flat[position].item()} in sample {int(segments.ids[position])} (flat token {position}); "
            "exclude the sample or look for its cause upstream"
        )
    return flat


def per_sample(name: str, values: Tensor, count: int, *, floating: bool = True) -> Tensor:
    """A finite [B] tensor, else ValueError or TypeError with the sample's index."""
    if values.shape != (count,):
        raise ValueError(f"{name}: shape {tuple(values.shape)}, expected [{count}], one entry per sample")
    if floating and not values.is_floating_point():
        raise TypeError(f"{name}: dtype {values.dtype}, expected a floating type")
    if floating and not bool(torch.isfinite(values).all()):
        sample = int((~torch.isfinite(values)).nonzero()[0, 0])
        raise ValueError(
            f"{name}: {values[sample].item()} in sample {sample}; exclude it or mark it as not scored"
        )
    return values


def positive(name: str, value: float) -> None:
    """Raises ValueError unless the number is finite and above 0."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} = {value}: must be a finite number above 0")

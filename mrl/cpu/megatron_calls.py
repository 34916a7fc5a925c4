"""Replace what megatron-core expects of CUDA, so that the same code runs without a GPU.

`run_on_cpu()` fails if CUDA exists. It changes torch and megatron for the whole process: call it only in
processes that train.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from mrl.cpu import gloo

CPU = torch.device("cpu")
_installed = False

_FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "empty_like",
    "as_tensor",
)
_TENSOR_TYPES = (
    "FloatTensor",
    "HalfTensor",
    "BFloat16Tensor",
    "IntTensor",
    "LongTensor",
    "DoubleTensor",
    "ByteTensor",
)


class NullStream:
    """Replaces torch.cuda.Stream and torch.cuda.Event: on a CPU everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *args: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or NullStream()

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def run_on_cpu() -> None:
    """Make Megatron run on this process's CPU, once; raise RuntimeError if CUDA is available."""
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            "CUDA is available on this machine, so the CPU platform must not be installed; use the GPU"
        )
    # megatron compiles small fusions; dynamo cannot trace through the replacements below.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # for later decorations
    torch.compiler.set_stance("force_eager")  # for earlier ones
    _replace_cuda_calls()
    _replace_cuda_types()
    _redirect_factories()
    _patch_megatron()
    gloo.share_device()
    _installed = True


def _replace_cuda_calls() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = NullStream
    cuda.current_device = lambda: CPU  # used as device=torch.cuda.current_device()
    cuda.current_stream = cuda.default_stream = lambda device=None: NullStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = cuda.set_device = lambda *args: None
    cuda.empty_cache = lambda: None
    cuda.memory_allocated = lambda *args: 0
    for module in (cuda, cuda.random):  # the RNG tracker forks the "cuda" generator
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
        module.manual_seed = lambda seed: torch.manual_seed(seed)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args: None
    tensor.pin_memory = lambda self, *args: self


def _replace_cuda_types() -> None:
    """Report CUDA types: the optimizer and gradient clipping compare Tensor.type() with
    "torch.cuda.FloatTensor"."""
    cuda: Any = torch.cuda
    for name in _TENSOR_TYPES:
        setattr(cuda, name, getattr(torch, name))
    plain_type = torch.Tensor.type

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain_type(self, *args, **kwargs)
        if not args and not kwargs and result.startswith("torch.") and not result.startswith("torch.cuda"):
            return result.replace("torch.", "torch.cuda.")
        return result

    torch.Tensor.type = cuda_type  # type: ignore[method-assign]


def _redirect_factories() -> None:
    """Redirect device="cuda", which schedules.py and others pass literally."""

    def on_cpu(factory: Callable) -> Callable:
        @functools.wraps(factory)
        def redirected(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is not None and device is not CPU and torch.device(device).type == "cuda":
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return redirected

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _patch_megatron() -> None:
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    _patch_uneven_collectives()
    modules: Any = (rng, moe_utils, dispatcher)
    rng_, moe_utils_, dispatcher_ = modules
    rng_._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng_._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    def splits_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """Convert CPU tensors too, because all_to_all needs numbers."""
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    moe_utils_.maybe_move_tensor_to_cpu = dispatcher_.maybe_move_tensor_to_cpu = splits_to_host


def _patch_uneven_collectives() -> None:
    """Add uneven collectives for expert tensor parallelism; gloo gathers and scatters only equal sizes."""
    import megatron.core.tensor_parallel.mappings as mappings
    import torch.distributed as dist

    module: Any = mappings
    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_uneven(
        tensor: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(tensor, group, output_split_sizes, use_global_buffer)
        padded = tensor.new_zeros((max(output_split_sizes), *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def scatter_uneven(
        tensor: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(tensor, group, input_split_sizes, use_global_buffer)
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    module._gather_along_first_dim = gather_uneven
    module._reduce_scatter_along_first_dim = scatter_uneven

"""Off-loading's host copies and the parameter memory on top: bytes, order of calls, repeated copies."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl.resharding.wire.exportable import exportable_allocations
from mrl.training.platform import device_memory
from mrl.training.platform.host_copies import HostCopies
from mrl.training.platform.parameter_memory import ParameterMemory
from tests.support.recorded_cuda import DEVICE, RecordedCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    recorder = RecordedCuda()
    recorder.install(monkeypatch)
    return recorder


def tensors() -> list[torch.Tensor]:
    """Return tensors of uneven sizes and types, one of them empty."""
    made = [torch.randn(5, 7), torch.randn(3).to(torch.bfloat16), torch.empty(0), torch.tensor(2.0)]
    return [t.clone() for t in made]


@pytest.mark.parametrize("keep", [True, False])
def test_what_comes_back_is_what_left(keep: bool) -> None:
    copies, originals = HostCopies(torch.device("cpu"), keep=keep), tensors()
    before = [t.clone() for t in originals]
    copies.start(originals)
    for tensor in originals:
        tensor.fill_(9.0)
    copies.restore(originals)
    assert all(torch.equal(a, b) for a, b in zip(originals, before, strict=True))
    assert (copies.num_bytes > 0) == keep


def test_pinned_buffers_are_made_once_and_copies_run_on_their_own_stream(cuda: RecordedCuda) -> None:
    """One registration serves all tensors, and one wait, however many there are."""
    copies, originals = HostCopies(DEVICE, keep=True), [torch.randn(4) for _ in range(100)]
    copies.start(originals)
    copies.wait()
    assert cuda.take() == ["pin", "side waits for current", "on side", "off side", "synchronize side"]
    copies.restore(originals)
    back = ["side waits for current", "on side", "off side", "current waits for side"]
    assert cuda.take() == back  # the host does not wait
    copies.start(originals)
    assert "pin" not in cuda.take()


def test_a_tensor_that_is_new_gets_a_buffer_and_the_others_keep_theirs(cuda: RecordedCuda) -> None:
    """Adam's moments appear with the first step."""
    copies, originals = HostCopies(DEVICE, keep=True), [torch.randn(1000), torch.randn(10)]
    copies.start(originals)
    copies.start([*originals, torch.randn(1000)])
    assert cuda.take().count("pin") == 2
    assert sum(cuda.registered.values()) == copies.num_bytes < 12_000


def test_buffers_of_tensors_that_are_gone_are_unpinned(cuda: RecordedCuda) -> None:
    """A checkpoint brings other moments."""
    copies = HostCopies(DEVICE, keep=True)
    copies.start([torch.randn(1000)])
    copies.start([torch.randn(1000)])
    assert sum(cuda.registered.values()) == copies.num_bytes < 5_000


def test_copies_that_nobody_holds_any_more_are_unpinned(cuda: RecordedCuda) -> None:
    """Otherwise their addresses could not be pinned again (runtime error 712 on an H100)."""
    for _ in range(3):
        HostCopies(DEVICE, keep=True).start([torch.randn(1000)])
        gc.collect()
        assert not cuda.registered
    assert cuda.take().count("unpin") == 3


def test_a_refused_registration_says_how_much_was_asked(cuda, monkeypatch) -> None:
    refuses = SimpleNamespace(cudaHostRegister=lambda address, num_bytes, flags: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refuses)
    with pytest.raises(RuntimeError, match="returned 2 for pinning"):
        HostCopies(DEVICE, keep=True).start([torch.randn(1000)])


def memory_of(parameters: torch.Tensor) -> ParameterMemory:
    """Return a parameter memory of one buffer, on a device that is not the CPU."""
    buffer = SimpleNamespace(
        param_data=parameters, grad_data=torch.zeros(len(parameters)), param_index_map={}
    )
    module = SimpleNamespace(weights=dict)
    model = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[], module=module)
    return ParameterMemory([model], device=DEVICE)


def copies_to_host(memory: ParameterMemory, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one with every copy of the buffers to the host."""
    made: list[int] = []
    original = HostCopies.start

    def start(self: HostCopies, tensors: Any) -> None:
        made.append(len(tensors))
        original(self, tensors)

    monkeypatch.setattr(HostCopies, "start", start)
    return made


def test_offload_empties_the_buffers_and_reload_fills_them(cuda: RecordedCuda) -> None:
    parameters = torch.arange(100.0)
    memory = memory_of(parameters)
    memory.offload()
    assert parameters.untyped_storage().size() == 0
    calls = cuda.take()
    assert calls[-1] == "synchronize side"  # nothing is freed that is still being copied
    memory.reload()
    assert torch.equal(parameters, torch.arange(100.0))
    assert memory.generation == 1


def test_parameters_that_nobody_changed_are_not_copied_again(cuda, monkeypatch) -> None:
    """The last weight sync's copy also serves the reference's swap, and an off-load without an update."""
    memory = memory_of(torch.arange(100.0))
    made = copies_to_host(memory, monkeypatch)
    reference = memory.snapshot()
    memory.start_copy()
    memory.offload()
    memory.reload()
    with memory.swapped_in(reference, "swap the reference in"):
        pass
    memory.offload()
    assert len(made) == 2  # the snapshot, and one copy of the parameters
    memory.reload()
    memory.note_change()
    memory.offload()
    assert len(made) == 3


def test_borrowed_buffers_hold_what_they_did_also_after_an_error(cuda: RecordedCuda) -> None:
    parameters = torch.arange(100.0)
    memory = memory_of(parameters)

    def fail_inside() -> None:
        with memory.preserved("load the reference"):
            parameters.fill_(7.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert torch.equal(parameters, torch.arange(100.0))


def test_what_is_freed_leaves_torchs_cache(cuda: RecordedCuda) -> None:
    device_memory.release_cached(DEVICE)
    assert cuda.take() == ["ipc_collect", "empty_cache"]


@pytest.fixture
def allocator() -> Any:
    """Restore the allocator's settings of this process afterwards."""
    before = torch._C._accelerator_getAllocatorSettings()
    yield torch._C._accelerator_setAllocatorSettings
    torch._C._accelerator_setAllocatorSettings(before or "expandable_segments:False")


def test_exported_memory_lies_outside_expandable_segments(allocator: Any) -> None:
    """The other settings stay, inside and afterwards."""
    allocator("expandable_segments:True,garbage_collection_threshold:0.8")
    with exportable_allocations():
        inside = torch._C._accelerator_getAllocatorSettings()
    assert inside == "expandable_segments:False,garbage_collection_threshold:0.8"
    after = torch._C._accelerator_getAllocatorSettings()
    assert after == "expandable_segments:True,garbage_collection_threshold:0.8"


def test_reloaded_parameters_lie_outside_expandable_segments(allocator, cuda, monkeypatch) -> None:
    allocator("expandable_segments:True")
    memory, seen, resize = memory_of(torch.arange(100.0)), [], torch.UntypedStorage.resize_
    memory.offload()

    def watched(storage: torch.UntypedStorage, size: int) -> None:
        seen.append((size, torch._C._accelerator_getAllocatorSettings()))
        resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", watched)
    memory.reload()
    gradients, parameters = (400, "expandable_segments:True"), (400, "expandable_segments:False")
    assert seen == [gradients, parameters]

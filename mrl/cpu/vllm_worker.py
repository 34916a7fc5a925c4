"""vLLM's worker on CPU, which does not touch a response's seed until it has a token to draw.

vLLM 0.32 samples every scheduled request, even if its prompt is not fully computed (it exceeds the batch's
remaining budget, or the request was preempted and starts over). It discards such tokens and rewinds the
request's random stream with `Generator.set_offset`, which only CUDA's generators have. Here the sampler
cannot reach those streams: nothing is drawn from them, so nothing needs rewinding, and a response's tokens do
not depend on how its prompt was split. It also reports sampling masks, which vLLM's runner for CPUs does not.
vLLM takes a worker class by name (`worker_cls`), so it needs no
patch.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.worker.cpu_worker import CPUWorker

from mrl.cpu import SAMPLING_MASKS, gloo
from mrl.cpu.vllm_routes import CapturedRoutes


class SeededCpuWorker(CPUWorker):
    """One rank of an engine on CPU."""

    _routes: CapturedRoutes | None = None
    _kept: torch.Tensor | None = None
    """[requests, vocabulary] bool of the last step, if it drew at a temperature."""

    def init_device(self) -> None:
        gloo.share_device()
        if self.parallel_config.nnodes_within_dp > 1:
            # vLLM finds workers of one node by the node's device count, which it takes as one on CPU.
            set_assigned_physical_gpu_ids(list(range(self.parallel_config.local_world_size)))
        super().init_device()

    def mrl_capture_routes(self) -> dict[str, Any]:
        """Start recording routes of requests on the engine's first rank, for mrl_take_routes. Other ranks
        record too if each routes only a part of the tokens, because the capturer gathers these."""
        try:
            if self.rank == 0 or self.parallel_config.use_sequence_parallel_moe:
                self._routes = CapturedRoutes(self.model_runner, self.model_config.max_model_len)
            return {}
        except Exception:
            return {"error": traceback.format_exc()}

    def mrl_take_routes(self, spans: list[tuple[str, int, int]]) -> dict[str, Any]:
        """Return {routes}: CapturedRoutes.take() on the first rank."""
        taken = self._routes.take(spans) if self._routes is not None else None
        return {"routes": taken} if self.rank == 0 else {}

    def execute_model(self, scheduler_output: Any) -> Any:
        result = super().execute_model(scheduler_output)
        if self._routes is not None and (count := scheduler_output.total_num_scheduled_tokens):
            self._routes.end_step(count)
        return result

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        ours: Any = self.vllm_config.additional_config
        if ours.get(SAMPLING_MASKS):
            self._keep_masks(self.model_runner.sampler.topk_topp_sampler)

    def _keep_masks(self, sampler: Any) -> None:
        """Keep which tokens the sampler left: those whose processed log-probs are above -inf."""
        draw = sampler.forward

        def forward(*arguments: Any) -> Any:
            drawn, logprobs = draw(*arguments)
            self._kept = logprobs > float("-inf")
            return drawn, logprobs

        sampler.forward = forward

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._kept = None
        with _without_unfinished_prompts(self.model_runner):
            output: Any = super().sample_tokens(grammar_output)
        if self._kept is not None and output is not None:
            output.sampling_masks = _mask_lists(self._kept)
        return output


def _mask_lists(kept: torch.Tensor) -> SamplingMaskLists:
    """Return vLLM's form of the masks [requests, vocabulary] of one token per request."""
    offsets = np.concatenate([[0], np.cumsum(kept.sum(dim=1).numpy())])
    return SamplingMaskLists(kept.nonzero()[:, 1].int().numpy(), offsets)


@contextlib.contextmanager
def _without_unfinished_prompts(runner: Any) -> Iterator[None]:
    """Remove the batch's generators (row to generator) of rows whose token is discarded."""
    generators = runner.input_batch.generators
    discarded = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
    removed = {int(row): generators.pop(row) for row in discarded if row in generators}
    try:
        yield
    finally:
        generators.update(removed)

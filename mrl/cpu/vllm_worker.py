"""vLLM's worker on CPU, which leaves the seeds of responses alone until they have a token to draw.

vLLM 0.32 samples every scheduled request, also those whose prompt is not yet computed to its end (it is longer than what
is left of the batch, or the request was preempted and starts over), throws such tokens away and winds the request's random
stream back with `Generator.set_offset`, which only CUDA's generators have. Here those streams are out of reach while the
sampler runs: nothing is drawn from them, so nothing has to be wound back, and a response's tokens do not depend on how its
prompt was split. vLLM takes a worker class by name (`worker_cls`), so that it is not patched.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.v1.worker.cpu_worker import CPUWorker

from mrl.cpu import gloo
from mrl.cpu.vllm_routes import CapturedRoutes


class SeededCpuWorker(CPUWorker):
    """One rank of an engine on CPU."""

    _routes: CapturedRoutes | None = None

    def init_device(self) -> None:
        gloo.share_device()
        if self.parallel_config.nnodes_within_dp > 1:
            # By the devices that a node is said to have vLLM tells which workers share one; it believes in one on a CPU.
            set_assigned_physical_gpu_ids(list(range(self.parallel_config.local_world_size)))
        super().init_device()

    def mrl_capture_routes(self) -> dict[str, Any]:
        """From now on the first rank of the engine keeps the routes of its requests, for mrl_take_routes; so do the others where each
        routes a part of the tokens only, because what listens gathers these."""
        try:
            if self.rank == 0 or self.parallel_config.use_sequence_parallel_moe:
                self._routes = CapturedRoutes(self.model_runner, self.model_config.max_model_len)
            return {}
        except Exception:
            return {"error": traceback.format_exc()}

    def mrl_take_routes(self, asked: list[tuple[str, int, int]]) -> dict[str, Any]:
        """{routes}: CapturedRoutes.take() on the first rank."""
        taken = self._routes.take(asked) if self._routes is not None else None
        return {"routes": taken} if self.rank == 0 else {}

    def execute_model(self, scheduler_output: Any) -> Any:
        result = super().execute_model(scheduler_output)
        if self._routes is not None and (count := scheduler_output.total_num_scheduled_tokens):
            self._routes.end_step(count)
        return result

    def sample_tokens(self, grammar_output: Any) -> Any:
        with _streams_of_unfinished_prompts_put_away(self.model_runner):
            return super().sample_tokens(grammar_output)


@contextlib.contextmanager
def _streams_of_unfinished_prompts_put_away(runner: Any) -> Iterator[None]:
    """The batch's generators (row to generator) lack the rows whose token is thrown away."""
    generators = runner.input_batch.generators
    thrown_away = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
    put_away = {int(row): generators.pop(row) for row in thrown_away if row in generators}
    try:
        yield
    finally:
        generators.update(put_away)

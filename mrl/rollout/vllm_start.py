"""vLLM's engine arguments from our settings, and the engine's start in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from mrl.config.root import Config
from mrl.config.sections.rollout import RolloutSection
from mrl.cpu import SAMPLING_MASKS, vllm_limits, vllm_preload
from mrl.errors import ConfigError, RolloutError
from mrl.rollout import engine_routes, passthrough_args, quantised, text_only, vllm_environment
from mrl.rollout.engine_process import EngineProcess

_CPU_WORKER = "mrl.cpu.vllm_worker.SeededCpuWorker"
"""A name, because vLLM imports it in its worker processes."""
Rendezvous = tuple[str, int]
"""(address, port) where the processes of one engine meet; they also use the next port."""


def run_arguments(config: Config, part: EngineProcess, meeting: Rendezvous | None) -> dict[str, Any]:
    """Return the inputs of `arguments` for all processes of an engine of a run."""
    return {
        "rollout": config.rollout,
        "model_path": config.model.path,
        "max_length": config.model.max_length,
        "seed": config.run.seed,
        "part": part,
        "meeting": meeting,
        "deterministic": config.loop.deterministic,
        "trust_remote_code": config.model.trust_remote_code,
        "routes": config.routing.replay == "engine",
    }


def start_engine(rollout: RolloutSection, model_path: str, *, part: EngineProcess, **options: Any) -> Any:
    """Return an LLMEngine in this process; `options`: see `arguments`. ConfigError if vLLM refuses them."""
    chosen = arguments(rollout, model_path, part=part, **options)
    from vllm.v1.engine.llm_engine import LLMEngine

    with _refusals(model_path):
        engine: Any = LLMEngine.from_vllm_config(_vllm_config(chosen, part), disable_log_stats=True)
    if rollout.truncates:
        # vLLM refuses the setting with its runner for CPUs; our worker reports the masks there
        engine.engine_core.engine_core.scheduler.return_sampling_mask = True
    return engine


def start_headless(rollout: RolloutSection, model_path: str, *, part: EngineProcess, **options: Any) -> Any:
    """Return the executor of a further node of an engine, with running workers that the first node calls."""
    chosen = arguments(rollout, model_path, part=part, **options)
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    with _refusals(model_path):
        return MultiprocExecutor(_vllm_config(chosen, part), monitor_workers=False)


@contextlib.contextmanager
def _refusals(model_path: str) -> Iterator[None]:
    """Raise vLLM's errors of incompatible settings as ConfigError."""
    try:
        yield
    except ValidationError as error:
        faults = "; ".join(": ".join([*map(str, fault["loc"]), fault["msg"]]) for fault in error.errors())
        raise ConfigError(f"vLLM does not start an engine of {model_path}: {faults}") from error


def _vllm_config(chosen: Any, part: EngineProcess) -> Any:
    """Return vLLM's configuration. The node counts are set afterwards: vLLM counts the nodes of all dp ranks,
    but its arguments refuse more nodes than one dp rank's tp can use."""
    config = chosen.create_engine_config(headless=part.node > 0)
    if part.nodes > 1:
        config.parallel_config.nnodes = part.dp * part.nodes
        config.parallel_config.node_rank = part.dp_rank * part.nodes + part.node
    return config


def arguments(
    rollout: RolloutSection,
    model_path: str,
    *,
    max_length: int,
    seed: int,
    part: EngineProcess,
    meeting: Rendezvous | None,
    deterministic: bool = False,
    real_weights: bool = False,
    trust_remote_code: bool = False,
    routes: bool = False,
) -> Any:
    """Set the process environment, import vLLM and return its EngineArgs.

    Raises:
        ConfigError, RolloutError: vLLM cannot start with these settings on this machine.
    """
    import torch

    passthrough_args.require(rollout.engine_args)
    if meeting is None and rollout.dp > 1:
        raise ConfigError(
            f"rollout.dp = {rollout.dp}: only a run's launcher starts several processes; set it to 1 here"
        )
    on_cpu = not torch.cuda.is_available()
    eager = is_eager(rollout, on_cpu=on_cpu, routes=routes)
    vllm_environment.prepare(rollout, part, meeting, compiled=not (on_cpu and eager), on_cpu=on_cpu)
    if on_cpu:
        vllm_limits.check_cpu(model_path, tp=rollout.tp, expert_parallel=rollout.expert_parallel)
        vllm_preload.preload_by_short_paths()
    else:
        _require_devices(rollout, part, torch.cuda.device_count())
    if routes and not on_cpu:
        engine_routes.require_prefix_cache(rollout, deterministic=deterministic)
    if (routes or rollout.truncates) and not on_cpu:
        vllm_environment.select_newer_runner()

    from vllm import EngineArgs
    from vllm.config import WeightTransferConfig

    import mrl.resharding.vllm.plugin as plugin

    seqs = rollout.max_num_seqs
    overrides = quantised.quantised_overrides(rollout, model_path, on_cpu=on_cpu, real_weights=real_weights)
    overrides |= text_only.family_overrides(model_path)
    if on_cpu:
        overrides |= vllm_limits.cpu_overrides(model_path)
    return EngineArgs(
        model=model_path,
        skip_tokenizer_init=not rollout.stop,
        trust_remote_code=trust_remote_code and bool(rollout.stop),
        tensor_parallel_size=rollout.tp,
        enable_expert_parallel=rollout.expert_parallel,
        distributed_executor_backend="uni" if rollout.tp == 1 else "mp",
        dtype=rollout.dtype,
        max_model_len=max_length,
        max_num_seqs=seqs,
        max_num_batched_tokens=min(rollout.max_num_batched_tokens, seqs * max_length),
        enforce_eager=eager,
        enable_prefix_caching=rollout.enable_prefix_caching and not deterministic,
        logprobs_mode="processed_logprobs",  # at the temperature, over the tokens that truncation leaves
        return_sampling_mask=rollout.truncates and not on_cpu,
        load_format=plugin.LOAD_FORMAT if real_weights else "dummy",
        generation_config="vllm",
        use_tqdm_on_load=False,
        disable_log_stats=True,
        seed=(seed + part.engine) % (1 << 31),
        worker_extension_cls=f"{plugin.__name__}.{plugin.WorkerExtension.__name__}",
        weight_transfer_config=WeightTransferConfig(backend=plugin.BACKEND),
        hf_overrides=text_only.config_overrides(model_path, overrides),
        enable_return_routed_experts=routes and not on_cpu,
        **(
            rollout.engine_args
            | _of_platform(rollout, model_path, on_cpu=on_cpu)
            | _of_parts(rollout, part, meeting)
        ),
    )


def is_eager(rollout: RolloutSection, *, on_cpu: bool, routes: bool) -> bool:
    """Return True if nothing is compiled. On CPU a compiled model lacks the hooks that record routes."""
    return rollout.enforce_eager is True or (on_cpu and (rollout.ranks > 1 or routes))


def _require_devices(rollout: RolloutSection, part: EngineProcess, seen: int) -> None:
    if seen < (wanted := rollout.tp // part.nodes):
        raise RolloutError(
            f"{part.name} needs {wanted} GPUs (of rollout.tp = {rollout.tp}) and sees {seen}: "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}"
        )


def _of_platform(rollout: RolloutSection, model_path: str, *, on_cpu: bool) -> dict[str, Any]:
    if on_cpu:
        fields: dict[str, Any] = {
            "kv_cache_memory_bytes": rollout.kv_cache_bytes,
            "worker_cls": _CPU_WORKER,
            "additional_config": rollout.engine_args.get("additional_config", {})
            | {SAMPLING_MASKS: rollout.truncates},
        }
        chosen = "attention_config" in rollout.engine_args
        return fields | ({} if chosen else vllm_limits.attention_override(model_path))
    return {
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_sleep_mode": rollout.enable_sleep_mode,
    }


def _of_parts(rollout: RolloutSection, part: EngineProcess, meeting: Rendezvous | None) -> dict[str, Any]:
    """Return the arguments of an engine of several processes."""
    if meeting is None or part.is_whole:
        return {}
    seconds = int(rollout.step_deadline_seconds)
    fields: dict[str, Any] = {
        "distributed_timeout_seconds": seconds,
        "cpu_distributed_timeout_seconds": seconds,
    }
    if part.dp > 1:
        # With asynchronous scheduling some steps run no forward pass, so ranks would run different numbers of
        # them. Batch sizes are exchanged over gloo, which has a deadline; NCCL kernels have none.
        fields |= {"async_scheduling": False, "disable_nccl_for_dp_synchronization": True}
    if part.nodes > 1:
        address, port = meeting
        fields |= {
            "nnodes": part.nodes,
            "node_rank": part.node,
            "master_addr": address,
            "master_port": port + 1,
        }
    return fields

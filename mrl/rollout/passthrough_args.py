"""Check of `rollout.engine_args`: fields of vLLM's EngineArgs that no setting of ours decides.

The fields are read from vLLM's source without importing it, so that an unknown name is reported before
anything starts, even on a machine where vLLM cannot be loaded.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError

_DP = "decided by rollout.dp and the launcher, which starts one process per dp rank of an engine"
_NODES = (
    "decided by the slots: if those of rollout.tp are on several nodes, the launcher starts a process on each"
)
_NO_RANKS = (
    "not supported: an engine's ranks are rollout.dp x tp, each beside a trainer rank or alone on a slot"
)
_DISTRIBUTION = (
    "decided by rollout.temperature, top_p, top_k and min_p, with which the trainer's log-probs are compared"
)
_OTHER_WEIGHTS = (
    "not supported: a weight sync sends only the policy's tensors, to the ranks that had them at the start"
)
_LAUNCHER = "decided by the launcher, which knows the slot's devices and the weights' source"

OWNED: dict[str, str] = {
    **dict.fromkeys(("model", "model_weights", "tokenizer", "served_model_name"), "decided by model.path"),
    **dict.fromkeys(
        ("revision", "code_revision", "tokenizer_revision", "hf_config_path"), "model.path is a folder"
    ),
    "trust_remote_code": "decided by model.trust_remote_code, for tokenizers: families are implemented here",
    "max_model_len": "decided by model.max_length",
    "seed": "decided by run.seed",
    "dtype": "decided by rollout.dtype",
    "tensor_parallel_size": "decided by rollout.tp",
    "enable_expert_parallel": "decided by rollout.expert_parallel",
    "max_num_seqs": "decided by rollout.max_num_seqs",
    "max_num_batched_tokens": "decided by rollout.max_num_batched_tokens",
    "enforce_eager": "decided by rollout.enforce_eager",
    "enable_prefix_caching": "decided by rollout.enable_prefix_caching",
    "enable_sleep_mode": "decided by rollout.enable_sleep_mode",
    "gpu_memory_utilization": "decided by rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "decided by rollout.kv_cache_bytes (on CPU) and rollout.gpu_memory_utilization",
    **dict.fromkeys(
        ("quantization", "quantization_config", "hf_overrides", "allow_deprecated_quantization"),
        "decided by rollout.quantization",
    ),
    **dict.fromkeys(
        (
            "logprobs_mode",
            "return_sampling_mask",
            "logits_processors",
            "generation_config",
            "override_generation_config",
            "max_logprobs",
        ),
        _DISTRIBUTION,
    ),
    "skip_tokenizer_init": "decided by rollout.stop",
    **dict.fromkeys(("enable_return_routed_experts", "aux_output_config"), "decided by routing.replay"),
    **dict.fromkeys(
        (
            "load_format",
            "weight_transfer_config",
            "worker_cls",
            "worker_extension_cls",
            "distributed_executor_backend",
            "device_ids",
            "disable_log_stats",
            "use_tqdm_on_load",
        ),
        _LAUNCHER,
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "prefill_context_parallel_size", "enable_elastic_ep"), _NO_RANKS
    ),
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), _NODES),
    **dict.fromkeys(
        (
            "data_parallel_size",
            "data_parallel_rank",
            "data_parallel_start_rank",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_hybrid_lb",
            "data_parallel_external_lb",
            "data_parallel_multi_port_external_lb",
            "data_parallel_backend",
            "disable_nccl_for_dp_synchronization",
        ),
        _DP,
    ),
    **dict.fromkeys(
        (
            "speculative_config",
            "spec_method",
            "spec_model",
            "spec_tokens",
            "enable_lora",
            "default_mm_loras",
            "enable_eplb",
            "eplb_config",
        ),
        _OTHER_WEIGHTS,
    ),
}
"""Field of EngineArgs that must not be passed through -> why, and the setting to use."""

_KINDS = {"int": {int}, "float": {float, int}, "bool": {bool}, "str": {str}, "None": {type(None)}}
"""Types whose values are checked here; vLLM checks the others when the engine starts."""


def argument_faults(arguments: Mapping[str, Any]) -> list[str]:
    """Return one sentence per entry of rollout.engine_args that cannot be passed on."""
    known = fields()
    return [
        f"rollout.engine_args.{name}: {fault}"
        for name, value in arguments.items()
        if (fault := _fault(name, value, known))
    ]


def require(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError with all faults."""
    if faults := argument_faults(arguments):
        raise ConfigError("\n".join(faults))


def _fault(name: str, value: Any, known: Mapping[str, str]) -> str:
    if name in OWNED:
        return OWNED[name]
    if known and name not in known:
        return f"vLLM's EngineArgs has no such field{_nearest(name, known)}"
    words = known.get(name, "Any").split(" | ")
    if all(word in _KINDS for word in words) and not any(type(value) in _KINDS[word] for word in words):
        return f"vLLM expects {known[name]}, got {value!r}"
    return ""


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


@functools.cache
def fields() -> dict[str, str]:
    """Return name -> annotation of each field of the installed vLLM's EngineArgs; empty without vLLM."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return {}
    source = (Path(package.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    (body,) = (
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
    }

"""Measure vLLM and megatron-core called alone on a workload: a lower bound of a step's time.

python -m benchmarks.against_trl.bare vllm W2 --out vllm.json
python -m benchmarks.against_trl.bare megatron W2 --out megatron.json

vLLM generates the responses; Megatron's GPTModel, layers and optimizer compute as many tokens' log-probs and
update once. Microbatches have `--microbatch-tokens`, padded to their longest sample: all that works on CPU.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.against_trl.workloads import THREADS, WORKLOADS, Workload, tell, write_model, write_tokenizer

WARM_UP = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=("vllm", "megatron"))
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--microbatch-tokens", type=int, default=8192)
    parser.add_argument("--eager", action="store_true", help="run vLLM without its compiler")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    work, repeats = WORKLOADS[options.workload], WARM_UP + options.repeats
    if options.which == "vllm":
        seconds = {"generate": _generate(work, repeats, eager=options.eager)}
    else:
        seconds = _train(work, repeats, options.microbatch_tokens)
    tell({name: values[WARM_UP:] for name, values in seconds.items()}, options.out)


def _generate(work: Workload, repeats: int, *, eager: bool) -> list[float]:
    """Return the seconds of generating the responses of each step."""
    import torch
    from vllm import LLM, SamplingParams

    folder = tempfile.mkdtemp(prefix="bare-vllm-")
    write_model(Path(folder), work)
    write_tokenizer(Path(folder), work)
    torch.set_num_threads(THREADS)
    engine = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=eager,
        max_model_len=work.max_length,
        max_num_seqs=256,
        kv_cache_memory_bytes=1 << 29,
        generation_config="vllm",
        seed=0,
    )
    prompts, spent = work.drawn(work.prompts * repeats), []
    for number in range(repeats):
        step = prompts[number * work.prompts : (number + 1) * work.prompts]
        params = SamplingParams(
            temperature=1.0,
            max_tokens=work.response_length,
            logprobs=0,
            detokenize=False,
            stop_token_ids=[0] if work.is_ragged else None,
        )
        requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in step for _ in range(work.samples)]
        start = time.perf_counter()
        engine.generate(requests, params, use_tqdm=False)
        spent.append(time.perf_counter() - start)
    return spent


def _train(work: Workload, repeats: int, most: int) -> dict[str, list[float]]:
    """Return the seconds of each pass for log-probs and of each update."""
    alone = _Megatron(work, list(_microbatches(work, most)))
    seconds: dict[str, list[float]] = {"recompute": [], "update": []}
    for _ in range(repeats):
        start = time.perf_counter()
        old = alone.score()
        scored = time.perf_counter()
        alone.update(old)
        seconds["recompute"].append(scored - start)
        seconds["update"].append(time.perf_counter() - scored)
    return seconds


class _Megatron:
    """Megatron's model, data parallelism and optimizer on one rank, and the microbatches of a step."""

    def __init__(self, work: Workload, batches: list[Any]) -> None:
        import torch
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        _start_alone()
        torch.set_num_threads(THREADS)
        model: Any = _model(work)
        model.config.finalize_model_grads_func = finalize_model_grads
        wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self._net = DistributedDataParallel(model.config, wrapping, model)
        options = OptimizerConfig(
            optimizer="adam", lr=work.rate, weight_decay=0.0, clip_grad=1.0, params_dtype=torch.float32
        )
        self._optimizer = get_megatron_optimizer(options, [self._net], use_gloo_process_groups=False)
        self._batches, self._longest = batches, work.max_length

    def score(self) -> list[Any]:
        """Return the log-probs of every microbatch."""
        import torch

        with torch.no_grad():
            return [_logprobs(batch, self._net) for batch in self._batches]

    def update(self, old: list[Any]) -> None:
        """Make one optimizer step."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        batches = self._batches

        def forward_step(data: Iterator[int], net: Any) -> tuple[Any, Callable[[Any], Any]]:
            number = next(data)
            return _logprobs(batches[number], net), lambda new: _loss(new, old[number], len(batches))

        self._net.zero_grad_buffer()
        self._optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(range(len(batches))),
            model=[self._net],
            num_microbatches=len(batches),
            seq_length=self._longest,
            micro_batch_size=1,
            forward_only=False,
        )
        self._optimizer.step()


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start_alone() -> None:
    """Start process groups of one rank."""
    from mrl.models.layout import Layout
    from mrl.training.platform.parallel import start_process_groups

    start_process_groups(
        Layout(), rank=0, world_size=1, store=f"tcp://127.0.0.1:{free_port()}", seed=1, collective_seconds=600
    )


def _logprobs(batch: Any, net: Any) -> Any:
    """Return the log-probs of each sample's next tokens."""
    import torch

    count, length = batch.shape
    positions = torch.arange(length).expand(count, length)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return -net(batch, positions, mask, labels=batch.roll(-1, dims=1))


def _loss(new: Any, old: Any, num_microbatches: int) -> tuple[Any, dict[str, Any]]:
    import torch

    ratio = (new - old).exp()
    loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean() / num_microbatches
    return loss, {"loss": loss.detach()}


def _model(work: Workload) -> Any:
    """Build a random GPTModel of the workload's shape with our RMSNorm, because Megatron's needs a GPU."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mrl.models.megatron.layer_modules import RMSNorm

    config = TransformerConfig(
        num_layers=work.layers,
        hidden_size=work.hidden,
        num_attention_heads=work.heads,
        num_query_groups=2,
        kv_channels=32,
        ffn_hidden_size=2 * work.hidden,
        moe_ffn_hidden_size=work.expert_width,
        num_moe_experts=work.experts,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        qk_layernorm=True,
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    layer: Any = get_gpt_layer_local_spec(
        num_experts=work.experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * work.layers, layer_norm=RMSNorm),  # type: ignore[arg-type]
        vocab_size=work.vocabulary,
        max_sequence_length=work.max_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def _microbatches(work: Workload, most: int) -> Iterator[Any]:
    """Yield a step's tokens [samples, longest] from short to long, as many samples as fit with padding."""
    import torch

    dice = torch.Generator().manual_seed(0)
    lengths = []
    for prompt in work.drawn(work.prompts):
        drawn = torch.empty(work.samples).geometric_(1 / 128, generator=dice).clamp(max=work.response_length)
        responses = drawn.long().tolist() if work.is_ragged else [work.response_length] * work.samples
        lengths += [len(prompt) + response for response in responses]
    batch: list[int] = []
    for length in sorted(lengths):
        if batch and (len(batch) + 1) * length > most:
            yield torch.randint(1, work.vocabulary, (len(batch), batch[-1]), generator=dice)
            batch = []
        batch.append(length)
    yield torch.randint(1, work.vocabulary, (len(batch), batch[-1]), generator=dice)


if __name__ == "__main__":
    main()

"""Replacements for CUDA, so that trainer and engines also run on a CPU. Nothing is installed with a GPU.

| file | adds |
|---|---|
| megatron_calls | what Megatron calls of torch.cuda; uneven collectives |
| gloo | one device, and one thread, for all gloo groups of a process |
| vllm_kernels | AMX tiles and the next four, installed by each vLLM worker |
| vllm_delta_net | gated delta nets in float32 |
| vllm_experts | experts spread over ranks |
| vllm_float8 | block-wise float8 weights on any CPU |
| vllm_router | sigmoid scores without groups |
| vllm_worker | the worker class, which leaves the seeds of unfinished prompts alone |
| vllm_routes | which experts each position of a request visits |
| vllm_limits | shapes that vLLM's CPU kernels lack, rejected before an engine starts |
"""

SAMPLING_MASKS = "mrl_sampling_masks"
"""Key in vLLM's additional_config: True if vllm_worker reports sampling masks."""

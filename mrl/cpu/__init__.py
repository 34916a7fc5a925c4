"""What stands in for CUDA, so that trainer and engines also run on a CPU. With a GPU none of it is installed.

| file | adds |
|---|---|
| megatron_calls | what Megatron calls of torch.cuda; uneven collectives |
| gloo | one device, and one thread, for all gloo groups of a process |
| vllm_kernels | AMX tiles and the next four, installed by each worker of vLLM |
| vllm_delta_net | gated delta nets in float32 |
| vllm_experts | experts that are dealt out over ranks |
| vllm_float8 | block-wise float8 weights on any CPU |
| vllm_router | sigmoid scores without groups |
| vllm_worker | the worker class, which leaves the seeds of unfinished prompts alone |
| vllm_routes | which experts each position of a request visits |
| vllm_limits | the shapes that vLLM's CPU kernels lack, refused before an engine starts |
"""

"""Verifiable rewards: judges, the pool of processes they work in, adapters for users' functions.

A judge looks at one sample (or one group) and gives a Verdict. "The judge failed" is never a low score: such a
sample is unjudged and excluded. Nothing here imports torch, ray, vllm or megatron.
"""

"""Verifiable rewards: verifiers, the pool of processes they work in, adapters for users' functions.

A verifier looks at one sample (or one group) and gives a Verdict. "The verifier failed" is never a low
score: such a sample has no reward and is excluded. Nothing here imports torch, ray, vllm or megatron.
"""

"""Verifiable rewards: verifiers, the process pool that runs them, and adapters for users' functions.

A verifier scores one sample (or one group) and returns a Verdict. A verifier's failure is never a low score:
the sample has no reward and is excluded. Nothing here imports torch, ray, vllm or megatron.
"""

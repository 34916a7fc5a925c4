"""Seeded generators of cases for every verifier: right answers in many spellings, and wrong ones that are close.

A module for each kind, with `GENERATORS`: the class of mistake by its name, and its generator. The tests run a
part of each; `benchmarks/verifiers.py` runs them all through the reward pool.
"""

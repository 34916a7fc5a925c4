"""Seeded generators of cases for every verifier: right answers in many spellings, and wrong ones that are close.

A module for each kind, with `GENERATORS`: the class of mistake by its name, and its generator. Tests run a
part of each.
"""

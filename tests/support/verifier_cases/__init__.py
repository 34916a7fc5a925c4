"""Seeded case generators for every verifier: correct answers in many spellings, and close incorrect ones.

Each module maps names of mistakes to generators in `GENERATORS`. Tests run a part of each.
"""

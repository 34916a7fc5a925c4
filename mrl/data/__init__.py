"""Rows in, tokenised prompts out, in an order that depends on the seed alone. Judges and loops are elsewhere."""

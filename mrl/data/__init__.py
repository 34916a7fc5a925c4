"""Rows in, tokenised prompts out, in an order that depends on the seed alone. Verifiers and loops are
elsewhere."""

"""Load rows and turn them into tokenised prompts, in an order that depends only on the seed."""

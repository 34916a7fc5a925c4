"""Estimators, losses and reward shaping as pure functions of tensors, and the two entry points the loop calls.

Owns the mathematics only: no configuration files, no processes, no engines. `recipe` (driver: rewards to advantages) and
`objective` (worker: one microbatch to a loss) put the blocks together as the configuration names them. Tensors are
packed: [N] tokens of whole sequences side by side, with `tokens.Segments`.
"""

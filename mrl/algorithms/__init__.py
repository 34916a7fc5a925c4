"""Estimators, losses and reward shaping as pure functions of tensors, and the loop's two entry points.

Contains the mathematics only: no configuration files, processes or engines. `recipe` (driver: rewards to
advantages) and `objective` (worker: one micro-batch to a loss) combine the blocks as configured. Tensors are
packed: [N] tokens of whole sequences side by side, with `tokens.Segments`.
"""

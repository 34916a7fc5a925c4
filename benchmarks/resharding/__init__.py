"""Benchmarks of the weight hand-over that anyone can run: `python -m resharding.bench` under torchrun, `one_gpu` on one GPU.

They drive the hand-over's own classes; nothing here moves weights in a way training does not. Without Ray.
"""

"""Benchmarks of the weight sync that anyone can run: `python -m benchmarks.resharding` under torchrun,
`one_gpu` on one GPU.

They drive the weight sync's own classes; nothing here moves weights in a way training does not. Without
Ray.
"""

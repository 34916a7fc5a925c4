"""Weight sync benchmarks: `python -m benchmarks.resharding` (torchrun), `one_gpu` on one GPU; no Ray.

They move weights only by the weight sync's own classes, as training does.
"""

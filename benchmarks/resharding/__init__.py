"""Weight sync benchmarks with training's classes: `benchmarks.resharding` (torchrun), `one_gpu`; no Ray."""

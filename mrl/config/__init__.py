"""Typed configuration. Importing this package imports neither torch, ray, vllm nor megatron."""

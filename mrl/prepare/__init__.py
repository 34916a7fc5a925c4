"""Make what a run can start from: task files, tokenizers, small random models."""

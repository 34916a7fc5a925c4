"""Things a run can start from when there is nothing yet: task files, tokenizers, small random models."""

"""Compares greedy responses of `mrl eval` with transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.data.tokenise import decoder
from tests.tiny_models import reference_model


def compared(samples: Path, tokenizer: Any, folder: Path, *, torn: float, limit: int = 6) -> int:
    """Return how many responses begin as transformers' do; all must, except after a near-tie (`torn`)."""
    text_of, reference, equal = decoder(tokenizer), reference_model(folder), 0
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        prompt = tokenizer(sample["prompt"])["input_ids"]
        tokens, margin = greedy(reference, prompt, end=tokenizer.eos_token_id, limit=limit)
        if margin > torn:
            equal += 1
            assert sample["response"].startswith(text_of([np.array(tokens)])[0]), sample
    return equal


def greedy(model: Any, prompt: list[int], *, end: int, limit: int) -> tuple[list[int], float]:
    """Return greedy tokens without the end token, and the smallest gap between the two best logits."""
    tokens, margin = list(prompt), float("inf")
    for _ in range(limit):
        with torch.no_grad():
            (best, second), (token, _) = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        margin = min(margin, float(best - second))
        if int(token) == end:
            break
        tokens.append(int(token))
    return tokens[len(prompt) :], margin

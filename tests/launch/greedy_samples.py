"""Greedy responses of `mrl eval` beside transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.data.tokenise import decoder
from tests.tiny_models import reference_model


def compared(samples: Path, tokenizer: Any, folder: Path, *, torn: float, limit: int = 6) -> int:
    """How many responses of a samples.jsonl begin with transformers' first tokens for the folder: all must, but where two
    logits on the way are no more than `torn` apart."""
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
    """At most so many tokens, the end's left out, and the least distance of a logit to the next one on the way."""
    tokens, margin = list(prompt), float("inf")
    for _ in range(limit):
        with torch.no_grad():
            (best, second), (token, _) = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        margin = min(margin, float(best - second))
        if int(token) == end:
            break
        tokens.append(int(token))
    return tokens[len(prompt) :], margin

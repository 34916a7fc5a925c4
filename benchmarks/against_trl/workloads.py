"""Steps that both trainers make: model, prompts, lengths, reward. Imports neither, as environments differ.

A step is one GRPO update of float32 weights by Adam at a constant rate. W and W2 have fixed lengths. W3 is
ragged: 16 or more prompt tokens; a response ends with a probability of 1/80 per token, at 512 at the latest.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sizes of a step; lengths in tokens."""

    layers: int
    hidden: int
    heads: int
    experts: int
    expert_width: int
    vocabulary: int
    prompts: int
    samples: int
    prompt_length: int
    response_length: int
    shortest_prompt: int | None = None
    """Set if lengths are ragged: prompts are between the two, and the model ends responses."""
    rate: float = 1e-4
    """Learning rate; almost 0 if the policy would learn to end at once."""

    @property
    def is_ragged(self) -> bool:
        return self.shortest_prompt is not None

    @property
    def max_length(self) -> int:
        return self.prompt_length + self.response_length

    def drawn(self, count: int) -> list[list[int]]:
        """Return the workload's first prompts; without token 0 if ragged, where it ends a response."""
        dice, first = random.Random(1234), int(self.is_ragged)
        lengths = (
            dice.randint(self.shortest_prompt, self.prompt_length)
            if self.shortest_prompt
            else self.prompt_length
            for _ in range(count)
        )
        return [[dice.randrange(first, self.vocabulary) for _ in range(length)] for length in lengths]


THREADS = 2
"""Threads of a trainer over all its processes, and of the engines that it takes turns with."""
W2 = Workload(8, 256, 4, 16, 128, 2048, prompts=16, samples=8, prompt_length=64, response_length=128)
WORKLOADS = {
    "tiny": Workload(2, 64, 4, 4, 32, 64, prompts=2, samples=2, prompt_length=4, response_length=6),
    "W": Workload(4, 128, 4, 8, 64, 512, prompts=32, samples=8, prompt_length=16, response_length=32),
    "W2": W2,
    "W3": dataclasses.replace(W2, prompt_length=256, response_length=512, shortest_prompt=16, rate=1e-8),
}
END_LOGIT, NO_END_LOGIT = 1.52, -200.0
"""End-token weights on a coordinate that is `_CONSTANT` in every embedding: probability about 1/80, and 0."""
_CONSTANT = 0.5


def reward(response: list[int]) -> float:
    """Return the share of even tokens."""
    return sum(token % 2 == 0 for token in response) / max(1, len(response))


def text_of(tokens: list[int]) -> str:
    """Return words that `write_tokenizer`'s tokenizer reads as these tokens."""
    return " ".join(f"t{token}" for token in tokens)


def write_model(folder: Path, work: Workload) -> None:
    """Write a Qwen3-MoE with random weights (seed 0), as transformers does."""
    import torch
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": work.vocabulary,
        "hidden_size": work.hidden,
        "intermediate_size": 2 * work.hidden,
        "num_hidden_layers": work.layers,
        "num_attention_heads": work.heads,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": work.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": work.expert_width,
        "norm_topk_prob": True,
        "max_position_embeddings": max(1024, work.max_length),
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields))
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = _CONSTANT
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[0] = 0.0
        model.lm_head.weight[0, 0] = END_LOGIT if work.is_ragged else NO_END_LOGIT
    model.save_pretrained(str(folder))


def write_tokenizer(folder: Path, work: Workload) -> None:
    """Write a tokenizer whose word "t17" is token 17; "t0" ends a response."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{token}": token for token in range(work.vocabulary)}
    read = Tokenizer(models.WordLevel(words, unk_token="t0"))
    read.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=read, padding_side="left", eos_token="t0", pad_token="t0"
    ).save_pretrained(str(folder))


def tell(figures: dict[str, Any], out: Path) -> None:
    """Write a run's figures as JSON."""
    out.write_text(json.dumps(figures, indent=1) + "\n")

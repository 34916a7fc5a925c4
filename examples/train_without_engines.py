"""Use advantages and losses in a plain PyTorch loop: GRPO teaches a table of logits to generate token 3."""

import numpy as np
import torch

from mrl.algorithms.objective import Objective
from mrl.algorithms.recipe import shape_and_estimate
from mrl.algorithms.tokens import Segments
from mrl.config.sections.algorithm import AlgorithmSection
from mrl.samples import TrainBatch

torch.manual_seed(0)
SAMPLES, LENGTH, VOCABULARY = 64, 4, 10
config = AlgorithmSection.model_validate({"estimator": {"name": "grpo"}, "loss": {"name": "ppo_clip"}})
objective, logits = Objective(config), torch.zeros(LENGTH, VOCABULARY, requires_grad=True)
optimizer = torch.optim.Adam([logits], lr=0.1)
for step in range(41):
    distribution = torch.distributions.Categorical(logits=logits)
    tokens = distribution.sample((SAMPLES,))
    logprobs, entropy = distribution.log_prob(tokens).flatten(), distribution.entropy().repeat(SAMPLES)
    rewards = (tokens == 3).double().mean(1).numpy()
    batch = TrainBatch(
        tokens=tokens.flatten().numpy(), cu_seqlens=np.arange(SAMPLES + 1, dtype=np.int32) * LENGTH,
        loss_mask=np.ones(SAMPLES * LENGTH, dtype=bool), group_ids=np.zeros(SAMPLES, dtype=np.int64),
        sample_ids=tuple(map(str, range(SAMPLES))),
        arrays={"rollout_logprobs": logprobs.detach().numpy()},
    )  # fmt: skip
    batch, _ = shape_and_estimate(config, batch, rewards)
    per_token = {**batch.arrays, "loss_mask": batch.loss_mask}
    arrays = {name: torch.from_numpy(array) for name, array in per_token.items()}
    counts = {"num_tokens": float(SAMPLES * LENGTH), "num_sequences": float(SAMPLES)}
    inputs = {"logprobs": logprobs, "entropy": entropy, "arrays": arrays, "denominators": counts}
    loss, _ = objective(**inputs, segments=Segments.of(np.full(SAMPLES, LENGTH)))
    logits.grad = None
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}  reward {rewards.mean():.2f}  entropy {entropy.mean():.2f}")

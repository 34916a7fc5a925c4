"""Mistakes made on purpose, one at a time, and the tests of the merge suite that must notice them.

    python -m tests.breakages             run all of them
    python -m tests.breakages clip mask   run these

Each run copies the working tree, changes one line, and runs the named tests. Exit code 1: one went unnoticed.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_SECONDS = 900


@dataclasses.dataclass(frozen=True, slots=True)
class Breakage:
    name: str
    file: str
    text: str
    """Code that is in the file exactly once."""
    mistake: str
    tests: tuple[str, ...]
    """Tests that run in seconds; at least one of them fails."""


BREAKAGES = (
    Breakage("clip", "mrl/algorithms/losses.py",
        "loss=torch.maximum(unclipped,", "loss=torch.minimum(unclipped,",
        ("tests/mrl/algorithms/test_policy_losses.py",)),
    Breakage("mask", "mrl/training/batch.py",
        "loss_mask=_after_prompts(samples, [s.loss_mask for s in samples], np.bool_),",
        "loss_mask=np.roll(_after_prompts(samples, [s.loss_mask for s in samples], np.bool_), 1),",
        ("tests/mrl/training/test_batch.py",)),
    Breakage("baseline", "mrl/algorithms/groups.py",
        "return (values - self.mean(values)) * self.active", "return values * self.active",
        ("tests/mrl/algorithms/test_advantages.py",)),
    Breakage("gae", "mrl/algorithms/advantages.py",
        "+ gamma * lam * running", "+ gamma * running", ("tests/mrl/algorithms/test_advantages.py",)),
    Breakage("aggregation", "mrl/algorithms/losses.py",
        "return kept.sum() / tokens.num_tokens", "return kept.sum() / tokens.mask.sum()",
        ("tests/mrl/algorithms/test_losses.py",)),
    Breakage("kl", "mrl/algorithms/kl.py",
        "return torch.expm1(exponent) + difference", "return torch.expm1(exponent) - difference",
        ("tests/mrl/algorithms/test_kl.py",)),
    Breakage("dpo", "mrl/algorithms/preference.py",
        "return _smoothed(section, section.beta * (chosen.ratio(section) - rejected.ratio(section)))",
        "return _smoothed(section, section.beta * (rejected.ratio(section) - chosen.ratio(section)))",
        ("tests/mrl/algorithms/test_preference.py",)),
    Breakage("temperature", "mrl/training/logprobs.py",
        "        logits = logits.div_(temperature)", "        pass",
        ("tests/mrl/training/test_logprobs.py",)),
    Breakage("stale-reference", "mrl/algorithms/objective.py",
        "return torch.where(age > 0, rollout.detach(), trainer)", "return trainer",
        ("tests/mrl/algorithms/test_ages.py",)),
    Breakage("warmup", "mrl/training/optimizer.py",
        "return section.lr * (step + 1) / section.warmup_steps",
        "return section.lr * step / section.warmup_steps", ("tests/mrl/training/test_optimizer.py",)),
    Breakage("gradient-clip", "mrl/training/optimizer.py",
        "        if self.section.clip_grad <= 0:", "        if self.section.clip_grad <= 1e9:",
        ("tests/mrl/training/test_optimizer_steps.py", "tests/mrl/training/test_worker.py")),
    Breakage("optimizer-stays", "mrl/training/optimizer.py",
        'if self._device.type == "cpu" or self._away:', "if True:",
        ("tests/mrl/training/test_host_state.py",)),
    Breakage("ranks-share", "mrl/training/passes.py",
        "scale = 1 / (self._layout.cp * float(total.item()))", "scale = 1 / float(total.item())",
        ("tests/mrl/training/test_context_parallel.py::test_the_load_balancing_loss_is_over_all_ranks_tokens",)),
    Breakage("router", "models/families/qwen3.py",
        '"moe_router_pre_softmax": not hf.get("norm_topk_prob", False)',
        '"moe_router_pre_softmax": hf.get("norm_topk_prob", False)',
        ("tests/mrl/training/test_families.py", "tests/mrl/training/test_family_matrix.py")),
    Breakage("adapter-scale", "models/megatron/lora_parameters.py",
        "sum_b.add_(torch.mm(dw, a.t()), alpha=self.scale)", "sum_b.add_(torch.mm(dw, a.t()))",
        ("tests/mrl/training/test_lora.py",)),
    Breakage("admission", "mrl/pool/ledger.py",
        "return ledger.num_in_flight + self.batch * len(ledger.uncommitted)", "return ledger.num_in_flight",
        ("tests/mrl/pool/test_worlds.py",)),
    Breakage("trained-twice", "mrl/pool/ledger.py",
        "trained = [e for e in self.entries(GroupState.TAKEN) if e.trained_at < version]",
        "trained = [e for e in self.entries(GroupState.TAKEN) if e.trained_at <= version]",
        ("tests/mrl/pool/test_worlds.py",)),
    Breakage("seeds", "mrl/rollout/seeds.py",
        "_permute_32(prompt_low << _SAMPLE_LOW_BITS | sample_low, _keys(run_seed, high))",
        "_permute_32(prompt_low << _SAMPLE_LOW_BITS, _keys(run_seed, high))",
        ("tests/mrl/rollout/test_seeds.py",)),
    Breakage("resumed-position", "mrl/data/prompt_stream.py",
        '        self._position = int(state["position"])', "        self._position = 0",
        ("tests/mrl/data/test_stream.py",)),
    Breakage("tool-tokens", "mrl/agents/episode.py",
        "self._masks.append(np.full(len(tokens), trains))",
        "self._masks.append(np.full(len(tokens), True))", ("tests/mrl/agents/test_episode.py",)),
    Breakage("reward-error", "mrl/samples.py",
        "judged = self.verdict is not None and self.verdict.kind is not VerdictKind.NO_REWARD",
        "judged = self.verdict is not None", ("tests/mrl/loops/test_group_supply.py",)),
    Breakage("prefix-cache", "mrl/rollout/engine.py",
        "if not self._running and not self._engine.reset_prefix_cache():", "if self._running is None:",
        ("tests/mrl/rollout/test_engine.py::test_a_new_version_forgets_the_old_ones_prefixes",)),
    Breakage("lost-bucket", "resharding/transfer/copies.py",
        "    for row in table.tolist():\n", "    for row in table.tolist()[:-1]:\n",
        ("tests/resharding/test_planned.py::test_every_slot_ends_with_its_bytes_of_which_only_the_plans_cross_nodes",)),
    Breakage("damaged-bucket", "resharding/wire/bucket_messages.py",
        "    if digest_bytes(data) != sent:", "    if sent is None:",
        ("tests/resharding/test_buckets.py::test_a_flipped_bit_is_refused",)),
    Breakage("close-numbers", "mrl/rewards/maths/scalars.py",
        "MIN_SIGNIFICANT = 6", "MIN_SIGNIFICANT = 3", ("tests/mrl/rewards/test_generated_cases.py",)),
    Breakage("fences", "mrl/rewards/code/program.py",
        'fence["marks"].startswith(opening["marks"])', "True", ("tests/mrl/rewards/test_program.py",)),
    Breakage("values", "mrl/rewards/code/tagged_values.py",
        "cmath.isclose(value, expected, rel_tol=tolerance)",
        "cmath.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)",
        ("tests/mrl/rewards/test_values.py",)),
    Breakage("sandbox-network", "mrl/rewards/code/sandbox.py",
        '"--unshare-all", "--new-session"', '"--unshare-all", "--share-net", "--new-session"',
        ("tests/mrl/rewards/test_attacks.py", "tests/mrl/rewards/test_boundary.py")),
    Breakage("not-a-number", "mrl/loops/nan_guard.py",
        "wrong = None if finite.all() else ~finite & batch.loss_mask", "wrong = None",
        ("tests/mrl/loops/test_nan_guard.py",)),
)  # fmt: skip


def run(breakage: Breakage) -> str:
    """Return the line of the first test that failed with the mistake; empty if none did.

    Raises:
        ValueError: the text is not in the file exactly once.
        RuntimeError: the tests did not run.
    """
    with tempfile.TemporaryDirectory(prefix="breakage-") as folder:
        copy = Path(folder) / "mrl"
        _copy_tree(copy)
        file = copy / breakage.file
        file.write_text(changed(breakage, file.read_text()))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not gpu", *breakage.tests]
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1) or (done.returncode == 1 and not failed):
        raise RuntimeError(
            f"{breakage.name}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return failed[0] if failed else ""


def changed(breakage: Breakage, source: str) -> str:
    """Return the source with the mistake; raise ValueError unless the text is in it exactly once."""
    if source.count(breakage.text) != 1:
        raise ValueError(
            f"{breakage.name}: {breakage.file} contains {source.count(breakage.text)} times: {breakage.text}"
        )
    return source.replace(breakage.text, breakage.mistake)


def _copy_tree(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True, timeout=60
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def main(names: list[str]) -> int:
    chosen = [breakage for breakage in BREAKAGES if not names or breakage.name in names]
    unnoticed = 0
    for breakage in chosen:
        line = run(breakage)
        unnoticed += not line
        print(f"{breakage.name}: {line or 'NOT NOTICED'}", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

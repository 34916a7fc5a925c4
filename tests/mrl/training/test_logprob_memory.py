"""Peak memory of log-probs and entropy: two chunks of logits, however many tokens, where the naive form holds several times all."""

import json
import subprocess
import sys
from pathlib import Path

MEASURE = """
import json, sys
import torch
from mrl.training.logprobs import logprobs_and_entropy

form, tokens, vocab, chunk, width = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)

def naive(hidden, weight, targets):
    logp = torch.log_softmax(hidden @ weight.t(), dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=-1)

def chunked(hidden, weight, targets):
    return logprobs_and_entropy(hidden, weight, targets, vocab_size=vocab, temperature=1.0, chunk_tokens=chunk)

def once(tokens):
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    start = resident()
    logprobs, entropy = globals()[form](hidden, weight, targets)
    forward = resident() - start
    (logprobs.mean() + 0.1 * entropy.mean()).backward()
    return forward, resident() - start

def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

once(8)  # libraries and their buffers
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
print(json.dumps(once(tokens)))
"""
WIDTH = 64


def peak(form: str, *, tokens: int, vocab: int, chunk: int) -> tuple[int, int]:
    """(after forward, after backward) bytes above what inputs take, at their peak, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, form, *map(str, (tokens, vocab, chunk, WIDTH))],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    forward, both = json.loads(done.stdout)
    return forward, both


def check(*, tokens: int, naive_tokens: int, vocab: int, chunk: int) -> str:
    """Asserts the bound; the figures as a line."""
    one = chunk * vocab * 4
    table = vocab * WIDTH * 4
    slack = one // 8 + (8 << 20)
    forward, both = peak("chunked", tokens=tokens, vocab=vocab, chunk=chunk)
    naive = peak("naive", tokens=naive_tokens, vocab=vocab, chunk=chunk)[1] * tokens // naive_tokens
    line = (
        f"{tokens} tokens, vocabulary {vocab}, chunk {chunk} ({one / 1e6:.0f} MB): forward {forward / 1e6:.0f} MB, "
        f"with backward {both / 1e6:.0f} MB; naive {naive / 1e6:.0f} MB"
    )
    assert one < forward <= 2 * one + slack, line
    # The gradient of the table, its sum in float32, and one chunk's share of it.
    assert both <= 2 * one + 3 * table + slack, line
    assert naive > 3 * tokens * vocab * 4, line
    return line


def test_two_chunks_of_logits_exist_at_most() -> None:
    check(tokens=1024, naive_tokens=256, vocab=65536, chunk=256)

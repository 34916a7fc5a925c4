"""Settings of judge servers and of the LLM judge."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from mrl.section import Section


class EngineSection(Section):
    """vLLM server that the run starts on this machine for its judges, and stops."""

    model: str
    """Serve the model in this folder, in Hugging Face format."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Compute in this type; auto: the type in the model's config."""
    tp: int = Field(default=1, ge=1)
    """Use this tensor-parallel size."""
    gpus: tuple[int, ...] = ()
    """Run on these GPUs of this machine, one per rank (`tp`). The run's slots use other GPUs, unless
    `shares_slots`. Leave it empty on a machine without GPUs."""
    shares_slots: bool = False
    """Share GPUs with the run's slots; the weights and `kv_cache_bytes` stay in their memory all the time."""
    max_length: int | None = Field(default=None, ge=2)
    """Limit question plus reply to this many tokens; null: the limit in the model's config."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Batch at most this many questions."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Give the KV cache this many bytes per rank; null: vLLM's default, on CPU 1 GiB (vLLM would take 92 % of
    the machine's memory)."""
    arguments: tuple[str, ...] = ()
    """Append these arguments to `vllm serve`; if an option is given twice, the last one counts."""
    restarts: int = Field(default=3, ge=0)
    """Restart a server that exited this many times per run, while samples wait; then stop the run. No sample
    gets a value because of it."""

    def faults(self) -> Iterator[str]:
        if self.gpus and len(set(self.gpus)) != self.tp:
            yield f"gpus = {list(self.gpus)} with tp = {self.tp}: a rank is one GPU; name {self.tp} GPUs"
        if self.shares_slots and not (self.gpus and self.kv_cache_bytes):
            yield "shares_slots needs gpus, and kv_cache_bytes: vLLM would take 90 % of the slots' memory"


class LlmRules(Section):
    """Rules for asking a language model for a verdict and reading its reply."""

    template: str | None = None
    """Ask with the text in this file, which contains {prompt}, {response} and, if `reference`, {reference};
    null: a built-in text."""
    reference: bool = True
    """Show the judge the row's ground truth, which every row then needs."""
    choices: dict[str, float] = Field(default={"no": 0.0, "yes": 1.0}, min_length=2)
    """Map each word that the judge may answer to its value."""
    verdict: Literal["line", "choice"] = "line"
    """line: let the judge think and end with a verdict line. choice: ask for one word, and average the values
    by the choices' probabilities; the server must return log-probs, and a choice must be one token."""
    constrained: bool = False
    """Let the server (vLLM) decode only the choices; for verdict = choice."""
    reply_tokens: int = Field(default=2048, ge=1)
    """Limit a reply to this many tokens; for verdict = line."""
    body: dict[str, Any] = {}
    """Add these fields to the body of each request."""

    def faults(self) -> Iterator[str]:
        if len({choice.strip().casefold() for choice in self.choices}) < len(self.choices):
            yield f"choices {list(self.choices)} must differ in more than capitals and spaces"
        if any(not choice.strip() or len(choice.splitlines()) > 1 for choice in self.choices):
            yield "a choice must be one line of text that is not empty"
        if len(set(self.choices.values())) < 2:
            yield "choices all have the same value; give them at least two different values"
        if self.constrained and self.verdict != "choice":
            yield "constrained is for verdict = choice only"

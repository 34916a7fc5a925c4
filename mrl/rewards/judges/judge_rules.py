"""What of asking a model is a setting."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from mrl.section import Section


class EngineSection(Section):
    """A vLLM server that the run starts for its judges, on this machine, and ends."""

    model: str
    """Folder of the model, in Hugging Face format."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """What it computes in; auto: what the folder says."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size."""
    gpus: tuple[int, ...] = ()
    """GPUs of this machine that are its own, as many as `tp`; the run's slots are on others, unless `shares_slots`. None on a machine
    without."""
    shares_slots: bool = False
    """Its GPUs are slots of the run too: of their memory it keeps its weights and `kv_cache_bytes` all the time."""
    max_length: int | None = Field(default=None, ge=2)
    """Longest question and reply, in tokens; null: what the model's folder says."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Questions in one batch at most."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Size of its KV cache (of each rank); null: vLLM's own choice, on CPU a GiB (vLLM's is 92 % of the machine's memory)."""
    arguments: tuple[str, ...] = ()
    """Further words of `vllm serve`; of a word that stands twice the last one counts."""
    restarts: int = Field(default=3, ge=0)
    """Times that a server that ended is started again in a run, while samples wait; then the run stops. A sample never has a value
    for it."""

    def faults(self) -> Iterator[str]:
        if self.gpus and len(set(self.gpus)) != self.tp:
            yield f"gpus = {list(self.gpus)} with tp = {self.tp}: a rank is one GPU; name {self.tp} of them"
        if self.shares_slots and not (self.gpus and self.kv_cache_bytes):
            yield "shares_slots needs gpus, and kv_cache_bytes: vLLM would take nine tenths of what the slots have"


class LlmRules(Section):
    """What a language model is asked, and how its answer is read."""

    template: str | None = None
    """Text file with {prompt}, {response} and, where `reference` is true, {reference}; there is one for each of the two."""
    reference: bool = True
    """Whether the judge sees the row's ground truth, which every row has then."""
    choices: dict[str, float] = Field(default={"no": 0.0, "yes": 1.0}, min_length=2)
    """What the judge may say, and the value of each."""
    verdict: Literal["line", "choice"] = "line"
    """line: it may think and ends with a line of a given form. choice: it says one word, and the value is the mean over
    the log-probs of the choices, which the server has to give; a choice is one token then."""
    constrained: bool = False
    """Ask the server (vLLM) to let it say nothing but a choice; for verdict = choice."""
    reply_tokens: int = Field(default=2048, ge=1)
    """Longest reply; for verdict = line."""
    body: dict[str, Any] = {}
    """Further fields of each request, as the server knows them."""

    def faults(self) -> Iterator[str]:
        if len({choice.strip().casefold() for choice in self.choices}) < len(self.choices):
            yield f"choices {list(self.choices)} differ in more than capitals and spaces"
        if any(not choice.strip() or len(choice.splitlines()) > 1 for choice in self.choices):
            yield "a choice is some text of one line"
        if len(set(self.choices.values())) < 2:
            yield "choices have more than one value"
        if self.constrained and self.verdict != "choice":
            yield "constrained is for verdict = choice"

"""Settings of one verifier that do not depend on its kind."""

import dataclasses
from typing import Literal, Self

from pydantic import Field, PrivateAttr

from mrl.section import Section

Style = Literal["native", "verl", "trl", "openrlhf"]

OF_A_WORKER = frozenset(
    {
        "kind",
        "path",
        "engine",
        "server",
        "style",
        "group",
        "min_reward",
        "deadline_seconds",
        "memory_mib",
        "concurrency",
    }
)
"""Settings that a verifier's processes use, besides its kind's rules; the others apply outside them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """Server that this run started, for a verifier."""

    socket: str
    """Unix socket that it listens on, in a folder that no other user may enter."""
    answers: str
    """Digest of all that decides its replies."""


class ServerSection(Section):
    """Calls to the server of a judge model."""

    model: str = ""
    """Name the model at the server; empty uses the server's default."""
    api_key_env: str | None = None
    """Read the server's key from this environment variable."""
    tries: int = Field(default=4, ge=1)
    """Try a call this often if the server refuses, is overloaded or breaks off, with growing pauses (or the
    one it requests) within the sample's deadline; each of `reward.retries` starts anew."""
    max_calls: int | None = Field(default=None, ge=1)
    """Stop giving rewards after this many answered calls of the run (per node), resumed parts included."""
    tokenizer: str | None = None
    """Take the control tokens that no response may write from this tokenizer folder; null: common ones."""


class RewardPart(Section):
    """One verifier."""

    kind: str | None = None
    """Choose the kind of verifier."""
    name: str = ""
    """Name it in the verdict's parts; empty uses the kind."""
    weight: float = 1.0
    """Multiply its value by this in a sum of parts."""
    gate: float | None = None
    """Run the domain's other verifiers from this value on, else each gets `min_reward`; null: no gate."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Look only at this share of the samples, drawn by their ids; only for an audit verifier (weight 0): it
    changes no reward, and `reward/agreement` is how often rewards agree with it."""
    path: str | None = None
    """Set the plug-in (package.module:function or file.py:function) or the base URL of a judge model."""
    engine: str | None = None
    """Use this one of `reward.engines` as the judge model, instead of a path."""
    server: ServerSection = ServerSection()
    """Configure calls to the server of a judge model (kinds llm and reward_model)."""
    style: Style | None = None
    """Set the plug-in's calling convention; null detects it by the arguments (`solution_str`: verl,
    `queries`: openrlhf, `completions`: trl, else native)."""
    group: bool = False
    """Let the plug-in score all samples of a prompt in one call."""
    min_reward: float = 0.0
    """Give a rejected response this value."""
    reject_truncated: bool = False
    """Reject a response that reached its token limit, unread: the last number of half an answer can be right
    by chance."""
    deadline_seconds: float = Field(default=10.0, gt=0)
    """Limit the work on one sample to so many seconds from its start, without waits for a CPU."""
    memory_mib: int = Field(default=2048, ge=128)
    """Limit the private memory of a reward worker to so many MiB."""
    concurrency: int = Field(default=64, ge=1)
    """Keep at most so many samples (groups) in flight per process of an async plug-in or a judge."""

    _served: Served | None = PrivateAttr(default=None)

    @property
    def served(self) -> Served | None:
        """Server of `engine`, once it is up."""
        return self._served

    def served_by(self, served: Served) -> Self:
        """Return a copy that uses this server."""
        part = self.model_copy()
        part._served = served
        return part

    @property
    def is_audit(self) -> bool:
        """True for an audit verifier: no reward depends on it."""
        return self.weight == 0 and self.gate is None

    @property
    def label(self) -> str:
        return self.name or self.kind or "reward"

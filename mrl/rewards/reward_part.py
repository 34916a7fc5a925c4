"""The settings of one verifier that do not depend on its kind."""

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
"""Settings that a verifier's processes work by, besides the rules of its kind. The others say when a verifier is asked, and what
becomes of its value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A server that this run started, as a verifier asks it."""

    socket: str
    """Unix socket that it listens on, in a folder that no other user may enter."""
    answers: str
    """Digest of all that decides its answers."""


class ServerSection(Section):
    """How the server of a model that judges is asked."""

    model: str = ""
    """The model's name at the server; empty: the server's own choice."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key."""
    tries: int = Field(default=4, ge=1)
    """Times that a call is made where the server refuses, is overloaded or breaks off, with growing pauses (or
    the one that it asks for), inside the sample's deadline; `reward.retries` begins anew."""
    max_calls: int | None = Field(default=None, ge=1)
    """Answered calls of the whole run (on each node), resumed parts included; no sample has a reward after
    them."""
    tokenizer: str | None = None
    """Folder of the judge's tokenizer, which knows the control tokens that no response may write; without it
    those of the common families are known."""


class RewardPart(Section):
    """One verifier."""

    kind: str | None = None
    """Which verifier."""
    name: str = ""
    """Name in the verdict's parts; by default the kind."""
    weight: float = 1.0
    """Factor in a sum of parts."""
    gate: float | None = None
    """Least value of it at which the domain's other verifiers are asked; below it each of them counts as its
    `min_reward`. null: it is no gate."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the samples that it looks at, drawn by their ids; of a witness alone, whose weight is 0: it
    changes no reward, and `reward/agreement` says how often rewards agree with it."""
    path: str | None = None
    """Plug-in as package.module:function or file.py:function; base URL of a model that judges."""
    engine: str | None = None
    """Of a model that judges: the one of `reward.engines` that is asked, in place of a path."""
    server: ServerSection = ServerSection()
    """How the server of a model that judges is asked (kinds llm and reward_model)."""
    style: Style | None = None
    """Calling convention of the plug-in; null: recognised by its arguments (`solution_str`: verl, `queries`: openrlhf, `completions`: trl,
    else native)."""
    group: bool = False
    """The plug-in scores all samples of a prompt in one call."""
    min_reward: float = 0.0
    """Value of a rejected response."""
    deadline_seconds: float = Field(default=10.0, gt=0)
    """Longest work on one sample, counted from the start of the work, without waits for a processor."""
    memory_mib: int = Field(default=2048, ge=128)
    """Private memory of a reward worker."""
    concurrency: int = Field(default=64, ge=1)
    """Samples (groups) that one process has in flight where the verifier waits: async plug-ins and
    judges."""

    _served: Served | None = PrivateAttr(default=None)

    @property
    def served(self) -> Served | None:
        """The server of `engine`, once it is up."""
        return self._served

    def served_by(self, served: Served) -> Self:
        """Return the verifier as one that asks this server."""
        asking = self.model_copy()
        asking._served = served
        return asking

    @property
    def is_witness(self) -> bool:
        """Whether it looks on alone: no reward depends on it."""
        return self.weight == 0 and self.gate is None

    @property
    def label(self) -> str:
        return self.name or self.kind or "reward"

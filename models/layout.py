"""How ranks share a model: sizes of the parallel axes and each rank's place on them. Pure; imports no engine.

Rank order is Megatron's default, tp-cp-ep-dp-pp: tp varies fastest, pp slowest. Expert parallelism re-uses the
ranks of one pipeline stage: expert tensor parallel fastest, then ep, then expert data parallel.
"""

from __future__ import annotations

import dataclasses

from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One rank's coordinates."""

    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A training layout. `world_size` = tp * cp * dp * pp; ep * etp must divide tp * cp * dp.

    >>> Layout(tp=2, ep=2).place(1)
    Place(rank=1, tp=1, cp=0, dp=0, pp=0, ep=1, etp=0, edp=0)
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    etp: int = 1
    vpp: int = 1
    """Model chunks per pipeline rank (virtual pipeline)."""

    def __post_init__(self) -> None:
        sizes = dataclasses.asdict(self)
        if bad := {k: v for k, v in sizes.items() if v < 1}:
            raise ConfigError(f"layout sizes must be at least 1, got {bad}")
        if (self.tp * self.cp * self.dp) % (self.ep * self.etp):
            raise ConfigError(
                f"ep x etp = {self.ep} x {self.etp} does not divide tp x cp x dp = {self.tp} x {self.cp} x {self.dp}; "
                "choose dp so that it does"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(f"vpp = {self.vpp} needs pp of at least 2")

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Replicas of each expert shard."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def place(self, rank: int) -> Place:
        """Coordinates of a global rank; a rank outside the world is an error."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside a world of {self.world_size}")
        stage = self.tp * self.cp * self.dp
        pp, inner = divmod(rank, stage)
        return Place(
            rank=rank,
            tp=inner % self.tp,
            cp=inner // self.tp % self.cp,
            dp=inner // (self.tp * self.cp),
            pp=pp,
            etp=inner % self.etp,
            ep=inner // self.etp % self.ep,
            edp=inner // (self.etp * self.ep),
        )

    def places(self) -> list[Place]:
        return [self.place(rank) for rank in range(self.world_size)]

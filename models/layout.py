"""Define training layouts: sizes of the parallel axes and each rank's coordinates. Pure; imports no engine.

Rank order is Megatron's default, tp-cp-ep-dp-pp: tp varies fastest, pp slowest. Expert parallelism reuses the
ranks of one pipeline stage: expert tensor parallel fastest, then ep, then expert data parallel.
"""

from __future__ import annotations

import dataclasses

from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class RankCoordinates:
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

    >>> Layout(tp=2, ep=2).coordinates(1)
    RankCoordinates(rank=1, tp=1, cp=0, dp=0, pp=0, ep=1, etp=0, edp=0)
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
            raise ConfigError(f"layout sizes must be at least 1, not {bad}")
        if (self.tp * self.cp * self.dp) % (self.ep * self.etp):
            raise ConfigError(
                f"ep x etp = {self.ep} x {self.etp} must divide tp x cp x dp = {self.tp} x {self.cp} x "
                f"{self.dp}; change dp"
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

    def coordinates(self, rank: int) -> RankCoordinates:
        """Return the coordinates of a global rank. Raises ConfigError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is outside a world of {self.world_size}")
        stage = self.tp * self.cp * self.dp
        pp, inner = divmod(rank, stage)
        return RankCoordinates(
            rank=rank,
            tp=inner % self.tp,
            cp=inner // self.tp % self.cp,
            dp=inner // (self.tp * self.cp),
            pp=pp,
            etp=inner % self.etp,
            ep=inner // self.etp % self.ep,
            edp=inner // (self.etp * self.ep),
        )

    def all_coordinates(self) -> list[RankCoordinates]:
        return [self.coordinates(rank) for rank in range(self.world_size)]


def divide(value: int, parts: int, *, name: str) -> int:
    """Return value / parts. Raise ConfigError about the quantity `name` if it is not an integer."""
    if value % parts:
        raise ConfigError(
            f"{name}: {value} cannot be split into {parts} equal parts; choose a layout that divides it"
        )
    return value // parts


def chunk_layers(num_layers: int, layout: Layout, pp: int) -> tuple[range, ...]:
    """Return the global layer numbers of each model chunk of one pipeline rank.

    Chunk c of pipeline rank p is virtual stage c * pp_size + p. A remainder goes to the first virtual stages,
    one layer each (Megatron then needs its `pipeline_model_parallel_layout`).

    >>> chunk_layers(8, Layout(pp=2, vpp=2), 1)
    (range(2, 4), range(6, 8))
    """
    stages = layout.pp * layout.vpp
    if num_layers < stages:
        raise ConfigError(
            f"{num_layers} layers cannot fill pp x vpp = {layout.pp} x {layout.vpp} stages; lower pp or vpp"
        )
    share, remainder = divmod(num_layers, stages)
    starts = [stage * share + min(stage, remainder) for stage in range(stages + 1)]
    return tuple(range(starts[s], starts[s + 1]) for s in range(pp, stages, layout.pp))


def padded_vocab(vocab_size: int, *, multiple: int) -> int:
    """Return the rows of an embedding: vocab_size rounded up to `multiple`; Megatron's to a multiple of tp.

    >>> padded_vocab(1001, multiple=2)
    1002
    """
    return -(-vocab_size // multiple) * multiple

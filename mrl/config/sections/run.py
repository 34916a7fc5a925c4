"""Settings of a run's name, folder and seed."""

from pydantic import Field

from mrl.section import Section


class RunSection(Section):
    """Name, folder and seed of a run."""

    name: str
    """Name the run; its folder is folder/name."""
    folder: str = "runs"
    """Put run folders here."""
    seed: int = Field(default=0, ge=0)
    """Seed data order, sampling and initialisation."""

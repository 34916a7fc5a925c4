"""Name, folder and seed of a run."""

from pydantic import Field

from mrl.section import Section


class RunSection(Section):
    """Name, folder and seed of a run."""

    name: str
    """Name of the run; its folder is folder/name."""
    folder: str = "runs"
    """Parent folder of all runs."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order, sampling and initialisation."""

"""The base of every configuration section: strict, frozen, unknown keys are errors."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of settings. Every field has one sentence of description, shown by `mrl settings`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )

"""Settings of the data: files, formats, domains and their mix."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from mrl.section import Section

Format = Literal["auto", "plain", "verl", "trl", "messages", "gsm8k", "math", "ifeval"]

RESERVED_ARGUMENTS = frozenset(
    ("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")
    + ("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict")
    + ("return_assistant_tokens_mask", "tokenizer_kwargs")
)
"""Arguments of `apply_chat_template` that the loader sets, or that do not concern the template."""


class ColumnMap(Section):
    """Names of the columns to read; a dotted name reaches into a nested column."""

    prompt: str | None = None
    """Read the prompt, text or messages, from this column; null follows the format."""
    answer: str | None = None
    """Read the ground truth or task from this column; null follows the format."""
    domain: str | None = None
    """Read the domain from this column, if one file mixes several."""
    tag: str | None = None
    """Split metrics inside a domain by this column (difficulty or source, for instance)."""


class DataEntry(Section):
    """One data set of one domain."""

    path: str | tuple[str, ...]
    """Read these files (.jsonl, .json, .parquet, .csv) or Hub data sets (hf://name:configuration@split)."""
    domain: str = "default"
    """Assign these rows to a domain, which chooses verifier, shaping and curves."""
    probability: float | None = Field(default=None, gt=0)
    """Draw this share of the training prompts, relative to other entries; null: in proportion to the rows."""
    format: Format = "auto"
    """Set the format of the rows; auto recognises it from the first row's columns."""
    columns: ColumnMap = ColumnMap()
    """Name the columns that differ from the format's."""
    system: str | None = None
    """Put this system message before every prompt of the entry."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class DifficultySection(Section):
    """Choice of training rows by the solve rates that `mrl eval --train` measured."""

    file: str
    """Read solve rates from this file, the rates.jsonl of `mrl eval --train --out FOLDER`."""
    min: float = Field(default=0.1, ge=0, lt=1)
    """Leave out rows with a lower solve rate: groups without a correct response teach nothing."""
    max: float = Field(default=0.9, gt=0, le=1)
    """Leave out rows with a higher solve rate."""

    def faults(self) -> Iterator[str]:
        if self.min >= self.max:
            yield f"min = {self.min:g} must be below max = {self.max:g}: no row would be left"


class DataSection(Section):
    """Training and validation rows; run.seed alone decides the order of prompts."""

    train: str | tuple[DataEntry, ...]
    """Train on this file (one domain) or list of entries."""
    validation: str | tuple[DataEntry, ...] | None = None
    """Validate on this file (one domain) or list of entries; null validates nothing."""
    format: Format = "auto"
    """Set the format of the rows if train or validation is a plain path."""
    columns: ColumnMap = ColumnMap()
    """Name the columns if train or validation is a plain path."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Limit prompts to this many tokens."""
    overlong: Literal["filter", "refuse"] = "filter"
    """Leave out and count longer prompts (filter), or end the run before engines start (refuse)."""
    unusable: Literal["refuse", "filter"] = "refuse"
    """End the run at a row of another format or with an unusable ground truth, or leave it out (filter)."""
    dedupe: bool = True
    """Keep the first of rows with the same prompt and domain, and report how many are left out."""
    overlap: Literal["report", "drop", "refuse"] = "report"
    """Count training prompts that are also in validation, drop them from training, or end the run."""
    chat_template: bool = True
    """Render messages with the tokenizer's chat template if it has one; text prompts stay as they are."""
    chat_template_kwargs: dict[str, Any] = {}
    """Pass these to the chat template (enable_thinking, ...); a row's own column of that name wins."""
    difficulty: DifficultySection | None = None
    """Leave out training rows that the model solves too rarely or too often; null keeps all."""
    shuffle: bool = True
    """Visit each epoch's rows in an order drawn from (seed, epoch); false keeps the file's order."""

    @field_validator("train", "validation")
    @classmethod
    def _not_empty(cls, value: object) -> object:
        if value is not None and not value:
            raise ValueError("names no file")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _free_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        reserved = sorted(RESERVED_ARGUMENTS & value.keys())
        if reserved:
            raise ValueError(
                f"{', '.join(reserved)}: set by the loader (tools come from the rows' column); remove"
            )
        return value

    def faults(self) -> Iterator[str]:
        if self.chat_template_kwargs and not self.chat_template:
            yield "chat_template_kwargs has no effect with chat_template = false; remove one of them"
        given = [entry.probability is not None for entry in self.train_entries()]
        if any(given) and not all(given):
            yield "train: only some entries have a probability; give one to all or none"

    def train_entries(self) -> tuple[DataEntry, ...]:
        """Return the training data sets; a plain path is one entry."""
        return self._entries(self.train)

    def validation_entries(self) -> tuple[DataEntry, ...]:
        """Return the validation data sets; empty if none is configured."""
        return () if self.validation is None else self._entries(self.validation)

    def _entries(self, value: str | tuple[DataEntry, ...]) -> tuple[DataEntry, ...]:
        if isinstance(value, str):
            return (DataEntry(path=value, format=self.format, columns=self.columns),)
        return value

"""Where prompts come from: files, their shapes, domains and their mix."""

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
"""Arguments of `apply_chat_template` that the loader sets, or that concern tokens rather than the
template."""


class ColumnMap(Section):
    """Names of the columns that are read; a dotted name reaches into a nested column."""

    prompt: str | None = None
    """Column with the prompt, text or messages; by default what the format says."""
    answer: str | None = None
    """Column with the ground truth or task; by default what the format says."""
    domain: str | None = None
    """Column with the domain, where one file mixes several."""
    tag: str | None = None
    """Column that splits metrics inside a domain (for instance difficulty or source)."""


class DataEntry(Section):
    """One data set of one domain."""

    path: str | tuple[str, ...]
    """File or files (.jsonl, .json, .parquet, .csv) or data sets of the hub (hf://name:configuration@split),
    in this order."""
    domain: str = "default"
    """Domain of these rows: chooses verifier, shaping and curves."""
    probability: float | None = Field(default=None, gt=0)
    """Share of the training prompts, relative to the other entries; by default in proportion to the rows."""
    format: Format = "auto"
    """Shape of the rows; auto recognises it from the first row's columns."""
    columns: ColumnMap = ColumnMap()
    """Column names where they differ from the format's own."""
    system: str | None = None
    """System message put before every prompt of this entry."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class DifficultySection(Section):
    """Solve rates that `mrl difficulty` measured, by which training rows are chosen."""

    file: str
    """Where `mrl difficulty` writes them (jsonl, a line for each prompt), and where runs read them."""
    min: float = Field(default=0.1, ge=0, lt=1)
    """Rows that are solved more rarely are left out: groups without a right response teach nothing."""
    max: float = Field(default=0.9, gt=0, le=1)
    """Rows that are solved more often are left out."""
    samples: int = Field(default=16, ge=1)
    """Samples that `mrl difficulty` draws of each prompt."""

    def faults(self) -> Iterator[str]:
        if self.min >= self.max:
            yield f"min = {self.min:g} is not below max = {self.max:g}: no row would be left"


class DataSection(Section):
    """Training and validation rows. The order of prompts is a function of the run's seed alone."""

    train: str | tuple[DataEntry, ...]
    """A file of one domain, or a list of entries."""
    validation: str | tuple[DataEntry, ...] | None = None
    """A file of one domain, or a list of entries; none means that nothing is validated."""
    format: Format = "auto"
    """Shape of the rows where train or validation is a plain path."""
    columns: ColumnMap = ColumnMap()
    """Column names where train or validation is a plain path."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens."""
    overlong: Literal["filter", "refuse"] = "filter"
    """Longer prompts are left out and counted, or end the run before engines start."""
    unusable: Literal["refuse", "filter"] = "refuse"
    """Rows that are not of the format, or whose ground truth cannot be verified, end the run, or are left out
    and counted."""
    dedupe: bool = True
    """Keep the first of rows with the same prompt and domain; the number left out is reported."""
    overlap: Literal["report", "drop", "refuse"] = "report"
    """Training prompts that are validation prompts too: count them, leave them out of training, or end the
    run."""
    chat_template: bool = True
    """Render messages with the tokenizer's chat template where it has one; prompts given as text stay as they
    are."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further arguments of the chat template (enable_thinking, ...); a row's own column of this name goes
    before."""
    difficulty: DifficultySection | None = None
    """Leave out training rows that the model solves too rarely or too often; absent means that all are kept."""
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
        taken = sorted(RESERVED_ARGUMENTS & value.keys())
        if taken:
            raise ValueError(f"{', '.join(taken)}: set by the loader (tools come from the rows' column)")
        return value

    def faults(self) -> Iterator[str]:
        if self.chat_template_kwargs and not self.chat_template:
            yield "chat_template_kwargs are the template's arguments, and chat_template is false"
        given = [entry.probability is not None for entry in self.train_entries()]
        if any(given) and not all(given):
            yield "train: probability is given for some entries and not for others; give all or none"

    def train_entries(self) -> tuple[DataEntry, ...]:
        """The training data sets, a plain path being one entry."""
        return self._entries(self.train)

    def validation_entries(self) -> tuple[DataEntry, ...]:
        """The validation data sets; empty when none is configured."""
        return () if self.validation is None else self._entries(self.validation)

    def _entries(self, value: str | tuple[DataEntry, ...]) -> tuple[DataEntry, ...]:
        if isinstance(value, str):
            return (DataEntry(path=value, format=self.format, columns=self.columns),)
        return value

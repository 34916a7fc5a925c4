"""`mrl data`: show rows as the policy sees them, their lengths, what is left out and why.

Rows are loaded as in a run; only the environment of episodes is started, if there is one.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.config.sections.tune import TuneSection
from mrl.data.conversation import Encoder
from mrl.data.load_rows import LoadReport, load_data
from mrl.data.preview import FilePreview, RowPreview, preview_source, preview_tune_file
from mrl.data.tokenise import load_tokenizer_for
from mrl.data.tune_rows import TuneRow, load_training, load_validation_rows
from mrl.launch.commands.tune import encoder_of
from mrl.prepare.new_model import write_tokenizer
from mrl.report.terminal import plain, terminal_text
from mrl.tokenizer_folder import load_tokenizer

BAR, GROUND_TRUTH = 40, 300
"""Maximum characters of a histogram bar, and of a ground truth."""


@dataclasses.dataclass(frozen=True, slots=True)
class Preview:
    """Result of `mrl data`."""

    files: list[FilePreview]
    report: LoadReport
    notes: list[str]
    max_prompt_tokens: int

    def text(self) -> str:
        """Return the result as text for a terminal."""
        lines = [self.report.text(), *(f"data: {note}" for note in self.notes)]
        for file in self.files:
            lines += ["", *_of_file(file, self.max_prompt_tokens)]
        return "\n".join(lines)


def preview(config: Config, *, rows: int) -> Preview:
    """Return the first `rows` rows of each file of data.train, data.validation and tune.data."""
    tokenizer = _tokenizer(config)
    section, tools, notes = config.data, None, []
    if config.agent is not None:
        from mrl.launch.workers.environments import check_environments

        acting = check_environments(config, tokenizer)
        tools = acting.tools_of if acting else None
        notes.append(
            "rows are shown here; an episode starts with its environment's first observation of the row"
        )
    dataset = load_data(section, config.reward, tokenizer, tools=tools)
    notes += dataset.warnings(config.loop)
    files = [
        file
        for use, sources in (("train", dataset.train), ("validation", dataset.validation))
        for source in sources
        for file in preview_source(use, source, tokenizer, rows=rows)
    ]
    if config.tune is not None:
        encoder = encoder_of(config, config.tune, tokenizer)
        files += _tuned(config, config.tune, encoder, tokenizer, rows)
        notes += [f"tune.data: {sentence}" for sentence in encoder.unread.sentences()]
    return Preview(files, dataset.report, notes, section.max_prompt_tokens)


def _tokenizer(config: Config) -> Any:
    """Return the model's tokenizer; train a temporary one if the model does not exist yet."""
    model = config.model
    if model.new is None or Path(model.path).exists():
        return load_tokenizer_for(model)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(model.new, [p for e in config.data.train_entries() for p in e.paths], folder)
        return load_tokenizer(folder)


def _tuned(
    config: Config, section: TuneSection, encoder: Encoder, tokenizer: Any, rows: int
) -> Iterator[FilePreview]:
    by_file = dict[str, list[TuneRow]]()
    for load in (load_training, load_validation_rows):
        for row in load(section, encoder, max_length=config.model.max_length).rows:
            by_file.setdefault(row.place.rpartition(":")[0], []).append(row)
    return (preview_tune_file(file, file_rows, tokenizer, rows=rows) for file, file_rows in by_file.items())


def _of_file(file: FilePreview, max_prompt_tokens: int) -> Iterator[str]:
    num_out = sum(group.count for group in file.left_out)
    yield f"{file.use} {file.file}: {file.kept + num_out} rows, {file.kept} kept"
    if any(file.domains):
        yield "  domains: " + ", ".join(f"{name} {count}" for name, count in sorted(file.domains.items()))
    for group in file.left_out:
        yield f"  left out by data.{group.rule}: {group.count} of domain {group.domain}"
        yield from (f"    {plain(example)}" for example in group.examples)
        if group.count > len(group.examples):
            yield f"    ... and {group.count - len(group.examples)} more"
    if file.lengths:
        limit = "" if file.use == "tune" else f" (data.max_prompt_tokens = {max_prompt_tokens})"
        yield from _histogram(file.lengths, limit)
    for row in file.first:
        yield from _of_row(row)


def _histogram(lengths: dict[str, Any], limit: str) -> Iterator[str]:
    yield (
        f"  tokens: {lengths['smallest']} to {lengths['largest']}, mean {lengths['mean']}, "
        f"median {lengths['median']}, 95 % up to {lengths['p95']}{limit}"
    )
    most = max(count for *_, count in lengths["histogram"])
    for first, last, count in lengths["histogram"]:
        span = str(first) if first == last else f"{first}-{last}"
        yield f"    {span:>11} {count:>8} {'#' * -(-count * BAR // most)}".rstrip()


def _of_row(row: RowPreview) -> Iterator[str]:
    labels = "".join(
        f", {name} {value}" for name, value in (("domain", row.domain), ("tag", row.tag)) if value
    )
    yield f"row {row.place}{labels}, {row.tokens} tokens"
    yield from terminal_text("prompt", row.text)
    if row.response is not None:
        yield from terminal_text("response", row.response)
    if row.rejected is not None:
        yield from terminal_text("rejected", row.rejected)
    counts = ", ".join(f"{name} x{count}" for name, count in row.special_tokens.items())
    yield f"  special tokens: {plain(counts) or 'none'}"
    if row.ground_truth is not None:
        cut = row.ground_truth[:GROUND_TRUTH]
        yield from terminal_text("ground truth", cut + (" ..." if len(row.ground_truth) > len(cut) else ""))

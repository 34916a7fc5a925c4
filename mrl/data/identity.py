"""Identify rows and prompts by their content, before a template is rendered and regardless of their file.

| part of the identity | when |
|---|---|
| domain, prompt (with data.system), tools, ground truth as in the file | always |
| the template and its arguments | if a chat template renders the row |

A date that the template writes, the file's name, the line and further columns are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mrl.data.row_shapes import DataRow
from mrl.samples import Prompt


def content_digest(row: DataRow, template: Any, arguments: dict[str, Any]) -> str:
    """Return the digest of a row's content.

    `ground_truth` is still as in the file; `template` is None if no template renders the row.
    """
    rendered = [template, arguments | dict(row.chat_template_kwargs)] if template else None
    content = [row.prompt, row.tools, row.ground_truth, rendered]
    return _digest(json.dumps(content, sort_keys=True, default=repr))


def prompt_id(prompt: Prompt) -> str:
    """Return a prompt's id, 16 hex digits; a prompt that no row made is identified by its tokens."""
    if prompt.content:
        return _digest(json.dumps([prompt.domain, prompt.content]))
    answer = prompt.ground_truth if isinstance(prompt.ground_truth, str) else ""
    return _digest(json.dumps([prompt.domain, prompt.tokens.tolist(), answer]))


def vocabulary_digest(tokenizer: Any) -> str:
    """Return the digest of the tokenizer's map from text to id."""
    return _digest(json.dumps(sorted(tokenizer.get_vocab().items())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

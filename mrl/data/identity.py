"""What makes two rows the same: what they say before a template is rendered and tokens are made, wherever they lie.

| of a row | goes in |
|---|---|
| always | domain, prompt (with data.system), tools, ground truth as the file has it |
| where a chat template renders it | the template, its arguments |

A date that the template writes, the file's name, the line and further columns do not.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mrl.data.row_shapes import DataRow
from mrl.samples import Prompt


def content_of(row: DataRow, template: Any, arguments: dict[str, Any]) -> str:
    """Return the digest of what a row says; `ground_truth` is still as the file has it, `template` None if none renders it."""
    rendered = [template, arguments | dict(row.chat_template_kwargs)] if template else None
    said = [row.prompt, row.tools, row.ground_truth, rendered]
    return _digest(json.dumps(said, sort_keys=True, default=repr))


def prompt_id(prompt: Prompt) -> str:
    """Return the identity of a prompt, in 16 hex digits; of one that no row made by its tokens."""
    if prompt.content:
        return _digest(json.dumps([prompt.domain, prompt.content]))
    answer = prompt.ground_truth if isinstance(prompt.ground_truth, str) else ""
    return _digest(json.dumps([prompt.domain, prompt.tokens.tolist(), answer]))


def vocabulary_digest(tokenizer: Any) -> str:
    """Return the digest of which id stands for which text."""
    return _digest(json.dumps(sorted(tokenizer.get_vocab().items())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""A generated tokenizer: one token per character, with and without a chat template."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(*, chat: bool = False, closing: bool = False) -> PreTrainedTokenizerFast:
    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: number for number, token in enumerate(["[UNK]", "[BOS]", "[EOS]", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    ends = "[BOS] $A [EOS]" if closing else "[BOS] $A"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=ends, special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="[BOS]", eos_token="[EOS]"
    )
    if chat:
        made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(chat=True)


@pytest.fixture(scope="session")
def closing_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(closing=True)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


TOOL_TEMPLATE = """\
{%- if tools %}[system]Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
{% endif -%}
{%- for m in messages %}
{%- if m.role == 'tool' %}[tool {{ m.name }} {{ m.tool_call_id }}]{{ m.content }}
{%- else %}[{{ m.role }}]{{ m.content if m.content is string else '' }}
{%- for call in m.tool_calls or [] %}<call {{ call.id }}>\
{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]\
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
"""A template with Qwen3's features: tools, calls, results, and an argument that turns thinking off."""


@pytest.fixture(scope="session")
def tool_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer

# ruff: noqa: RUF001
"""Chat templates in the published forms of the trained families: turns, calls and tool results.

They omit the system prompts and descriptions of the published files.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_LAST_USER = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{% endif -%}{% endfor -%}"
)
_SPLIT = (
    "{%- set text = m.content or '' %}{%- set thought = '' %}{%- if '</think>' in text %}"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif -%}"
)
_OF_TOOL_FIRST = "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
_OF_TOOL_LAST = "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"


@dataclasses.dataclass(frozen=True)
class Form:
    """One family's template."""

    template: str
    stops_call: str
    """The end of the policy's text in a turn with calls."""
    stops: str
    """The same for a turn without calls."""
    marks: tuple[str, ...] = ()
    """Added tokens besides those in the template's angle brackets."""
    calls_at_once: int = 2


_CHATML = (
    _LAST_USER + "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}"
    + "{%- if m.role == 'tool' %}"
    + _OF_TOOL_FIRST
    + "<|im_start|>user{% endif -%}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    + _OF_TOOL_LAST
    + "<|im_end|>\n{% endif -%}{%- elif m.role == 'assistant' %}"
    + _SPLIT
    + "<|im_start|>assistant\n{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    + "{{ '<think>\n' + thought + '\n</think>\n\n' if thought else '' }}{% endif -%}"
    "{{ text }}CALLS<|im_end|>\n"
    + "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif -%}{%- endfor -%}"
    + "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
).replace("assistant\n{%-", "{{ 'assistant\n' }}{%-")

FORMS = {
    "qwen3": Form(
        _CHATML.replace(
            "CALLS",
            "{%- for c in m.tool_calls or [] %}"
            '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
            "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
            "{{ '}\n</tool_call>' }}{% endfor -%}",
        ),
        "<|im_end|>",
        "<|im_end|>",
    ),
    "qwen3_5": Form(
        _CHATML.replace(
            "CALLS",
            "{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
            "{%- for k, v in c.function.arguments | items %}"
            "{{ '<parameter=' + k + '>\n' + v | string + '\n</parameter>\n' }}{% endfor -%}"
            "{{ '</function>\n</tool_call>' }}{% endfor -%}",
        ),
        "<|im_end|>",
        "<|im_end|>",
    ),
    "glm4_moe": Form(
        _LAST_USER
        + "[gMASK]<sop>{%- if tools %}<|system|>\n{{ tools | tojson }}{% endif -%}{%- for m in messages %}"
        "{%- if m.role == 'user' %}"
        + "{{ '<|user|>\n' + m.content }}{%- elif m.role == 'assistant' %}<|assistant|>"
        + _SPLIT
        + "{%- if loop.index0 > ns.last and thought %}{{ '\n<think>' + thought.strip() + '</think>' }}"
        + "{%- else %}{{ '\n<think></think>' }}{% endif -%}{{ '\n' + text.strip() if text.strip() else '' }}"
        + "{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}"
        "{%- for k, v in c.function.arguments.items() %}"
        + "{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{ v if v is string else v | tojson }}"
        "{{ '</arg_value>\n' }}{% endfor -%}"
        + "</tool_call>{% endfor -%}{%- elif m.role == 'tool' %}"
        + _OF_TOOL_FIRST
        + "<|observation|>{% endif -%}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
        "{% endif -%}{%- endfor -%}" + "{%- if add_generation_prompt %}<|assistant|>{% endif -%}",
        "<|observation|>",
        "<|user|>",
        ("[gMASK]", "<sop>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "deepseek_v3": Form(
        "{%- set ns = namespace(tool=false, first=true) %}<｜begin▁of▁sentence｜>{%- for m in messages %}"
        "{%- if m.role == 'user' %}{%- set ns.tool = false %}{{ '<｜User｜>' + m.content }}"
        "{%- elif m.role == 'assistant' %}{%- if ns.tool %}<｜tool▁outputs▁end｜>{%- else %}<｜Assistant｜>"
        "{% endif -%}{%- set ns.tool = false %}{{ m.content or '' }}{%- for c in m.tool_calls or [] %}"
        "{{ '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}"
        "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + "
        "c.function.arguments + '\n```' }}<｜tool▁call▁end｜>{{ '<｜tool▁calls▁end｜>' if loop.last }}"
        "{% endfor -%}<｜end▁of▁sentence｜>{%- elif m.role == 'tool' %}"
        "{{ '\n' if ns.tool else '<｜tool▁outputs▁begin｜>' }}{%- set ns.tool = true %}"
        "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif -%}{%- endfor -%}"
        "{%- if ns.tool %}<｜tool▁outputs▁end｜>{%- elif add_generation_prompt %}<｜Assistant｜>{% endif -%}",
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "kimi_k2": Form(
        "{%- for m in messages %}{%- set role = m.get('name') or m.role %}"
        "{{ {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(m.role, "
        "'<|im_system|>') + role + '<|im_middle|>' }}{%- if m.role == 'tool' %}"
        "{{ '## Return of ' + m.tool_call_id + '\n' + m.content }}{%- else %}{{ m.content or '' }}"
        "{%- for c in m.tool_calls or [] %}"
        "{{ '<|tool_calls_section_begin|>' if loop.first }}<|tool_call_begin|>"
        "{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson "
        "}}<|tool_call_end|>{{ '<|tool_calls_section_end|>' if loop.last }}{% endfor -%}{% endif -%}"
        "<|im_end|>{%- endfor -%}{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
        "{% endif -%}",
        "<|im_end|>",
        "<|im_end|>",
    ),
    "mixtral": Form(
        "<s>{%- for m in messages %}{%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
        "{%- elif m.tool_calls %}[TOOL_CALLS] [{%- for c in m.tool_calls %}"
        "{%- set out = c.function | tojson %}{{ out[:-1] }}{%- if c.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif -%}"
        "{{ ', \"id\": \"' + c.id + '\"}' + (']</s>' if loop.last else ', ') }}{% endfor -%}"
        "{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{%- elif m.role == 'tool' %}"
        "{%- if m.tool_call_id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif -%}"
        '{{ \'[TOOL_RESULTS] {"content": \' + m.content | string + \', "call_id": "\' + m.tool_call_id + '
        "'\"}[/TOOL_RESULTS]' }}{% endif -%}{%- endfor -%}",
        "</s>",
        "</s>",
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "llama": Form(
        "<|begin_of_text|>{%- for m in messages %}{%- if m.role == 'tool' %}"
        "<|start_header_id|>ipython<|end_header_id|>{{ '\n\n' }}"
        "{%- if m.content is mapping or m.content is iterable %}{{ m.content | tojson }}{%- else %}"
        "{{ m.content }}{% endif -%}<|eot_id|>{%- elif 'tool_calls' in m %}"
        "{%- if m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif -%}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
        "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}{%- else %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
        "{% endif -%}{%- endfor -%}{%- if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}",
        "<|eot_id|>",
        "<|eot_id|>",
        calls_at_once=1,
    ),
    "gpt_oss": Form(
        "{%- set last = namespace(name=none) %}<|start|>system<|message|>x<|end|>{%- for m in messages %}"
        "{%- if m.role == 'assistant' %}{%- if 'tool_calls' in m %}{%- if m.content %}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif -%}"
        "{%- set last.name = m.tool_calls[0].function.name %}"
        "{{ '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{%- else %}"
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{%- if loop.last and not add_generation_prompt %}<|return|>{%- else %}<|end|>{% endif -%}"
        "{% endif -%}{%- elif m.role == 'tool' %}{%- if last.name is none %}"
        "{{ raise_exception('no call before a tool') }}{% endif -%}"
        "{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + m.content "
        "| tojson + '<|end|>' }}{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
        "{% endif -%}{%- endfor -%}{%- if add_generation_prompt %}<|start|>assistant{% endif -%}",
        "<|call|>",
        "<|return|>",
    ),
    "minimax_m2": Form(
        _LAST_USER
        + "]~!b[{%- for m in messages %}{%- if m.role == 'assistant' %}{{ ']~b]ai\n' }}"
        + _SPLIT
        + "{%- if thought and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}"
        "{% endif -%}{{ text }}"
        + "{%- for c in m.tool_calls or [] %}{{ '\n<minimax:tool_call>\n' if loop.first }}"
        "{{ '<invoke name=\"' + c.function.name + '\">\n' }}"
        + "{%- for k, v in c.function.arguments.items() %}{{ '<parameter name=\"' + k + '\">' }}"
        "{{ v | tojson if v is not string else v }}" + "{{ '</parameter>\n' }}{% endfor -%}"
        "{{ '</invoke>\n' + ('</minimax:tool_call>' if loop.last else '') }}{% endfor -%}"
        + "{{ '[e~[\n' }}{%- elif m.role == 'tool' %}"
        + _OF_TOOL_FIRST
        + "]~b]tool{% endif -%}{{ '\n<response>' + m.content + '</response>' }}"
        + _OF_TOOL_LAST
        + "{{ '[e~[\n' }}{% endif -%}{%- else %}{{ ']~b]' + m.role + '\n' + m.content + '[e~[\n' }}"
        "{% endif -%}{%- endfor -%}" + "{%- if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif -%}",
        "[e~[",
        "[e~[",
        ("]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
}

OLMOE = (
    "<|endoftext|>{%- for m in messages %}{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content + '\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{{ '<|assistant|>\n' + m.content + '<|endoftext|>' + ('' if loop.last else '\n') }}{% endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif -%}"
)
"""A template without tools."""


def tokenizer(form: Form) -> Any:
    """Return a byte-level tokenizer with the template's marks as added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = {*re.findall(r"<[|｜][^<>\s]+?[|｜]>", form.template), *form.marks, form.stops, form.stops_call}
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in sorted(marks)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=form.stops)
    fast.chat_template = form.template
    return fast

# ruff: noqa: RUF001
"""Small tokenizers with the chat templates of Qwen, Llama 3, Mistral and DeepSeek, without their extras."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = [
    'The answer is 42. Tools say: {"result": 17}, and users ask again and again.',
    "What is 3 times 4? <b>html</b> and code: def f(x): return x + 1\n\n\tdone.",
    "short words in many rows, numbers 0 1 2 3 4 5 6 7 8 9, and the end of it",
]

CHATML = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif -%}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif -%}"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor -%}"
    "<|im_end|>\n{% endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
FORGETFUL = CHATML.replace(
    "{{ m.content }}{%- for c",
    "{%- if m.role == 'assistant' and not loop.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{%- else %}{{ m.content }}{% endif -%}{%- for c",
)
"""ChatML that drops thoughts from turns that are no longer the last."""
LLAMA = (
    "<|begin_of_text|>{%- for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor -%}<|eot_id|>{%- endfor -%}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif -%}"
)
MISTRAL = (
    "<s>{%- for m in messages %}{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }} [/TOOL_RESULTS]{%- else %} {{ m.content }}"
    "{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function | tojson }}{% endfor -%}</s>{% endif -%}"
    "{%- endfor -%}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{%- for m in messages %}{%- if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{%- else %}"
    "<｜Assistant｜>{{ m.content }}{%- for c in m.tool_calls or [] %}<｜tool▁call▁begin｜>"
    "{{ c.function | tojson }}<｜tool▁call▁end｜>{% endfor -%}<｜end▁of▁sentence｜>{% endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt %}<｜Assistant｜>{% endif -%}"
)


def _byte_level(special: list[str], plain: list[str], template: str, end: str) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    tokenizer.train_from_iterator(_TEXT, trainer)
    return _chat(tokenizer, special, plain, template, end)


def _pieces(special: list[str], template: str, end: str) -> Any:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )  # type: ignore[call-arg]
    tokenizer.train_from_iterator(_TEXT, trainer)
    return _chat(tokenizer, special, [], template, end, unk_token="<unk>")


def _chat(
    tokenizer: Tokenizer, special: list[str], plain: list[str], template: str, end: str, **options: Any
) -> Any:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, **options)
    made.chat_template = template
    return made


def qwen(template: str = CHATML) -> Any:
    """Return ChatML, byte-level."""
    marks = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    return _byte_level(["<|im_start|>", "<|im_end|>", "<|endoftext|>"], marks, template, "<|im_end|>")


def marked(special: list[str], *, words: list[str] | None = None, by_pieces: bool = False) -> Any:
    """Return one with these special tokens and added words, byte-level or in pieces with a space mark."""
    special = [*special, "<|done|>"]
    if by_pieces:
        return _pieces(special, CHATML, "<|done|>")
    return _byte_level(special, words or [], CHATML, "<|done|>")


def llama() -> Any:
    special = [
        "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>",
    ]  # fmt: skip
    return _byte_level(special, [], LLAMA, "<|eot_id|>")


def mistral() -> Any:
    """Return Mistral's brackets, in pieces with a space mark, without untrained letters."""
    special = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    return _pieces(special, MISTRAL, "</s>")


def deepseek() -> Any:
    names = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"]
    names += [f"tool▁{part}▁{end}" for part in ("call", "output") for end in ("begin", "end")]
    return _byte_level([f"<｜{name}｜>" for name in names], [], DEEPSEEK, "<｜end▁of▁sentence｜>")


ALL = {"qwen": qwen, "llama": llama, "mistral": mistral, "deepseek": deepseek}

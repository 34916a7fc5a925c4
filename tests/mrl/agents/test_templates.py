"""Text after a turn equals what `apply_chat_template` renders, for the templates of published families."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mrl.agents.render import Observation, TurnRenderer
from mrl.errors import ConfigError
from tests.support.family_templates import FORMS, OLMOE, Form, tokenizer

SAID = ' the "sum"\nis 3,\t語 é \n'
NAMES, IDS = ("add", "multiply"), ("a1B2c3D4e", "f5G6h7I8j")
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}},
    }
    for name in NAMES
]
QUESTION = {"role": "user", "content": "1+2?"}


def _conversation(count: int, *, as_text: bool) -> list[dict[str, Any]]:
    arguments = {"a": [1, "x"]}
    calls = [
        {"id": call_id, "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}}
        for name, call_id in zip(NAMES[:count], IDS[:count], strict=True)
    ]  # fmt: skip
    results = [
        {"role": "tool", "content": f"{SAID}{number}{SAID}", "tool_call_id": call_id, "name": name}
        for number, (name, call_id) in enumerate(zip(NAMES[:count], IDS[:count], strict=True))
    ]
    return [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _rendered(fast: Any, messages: list[dict[str, Any]], opens: bool) -> str:
    return fast.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=opens)


def _written(before: str, stop: str) -> str:
    """Return a turn as the policy wrote it, up to its stop token."""
    at = before.rfind(stop)
    return before[: at + len(stop)] if at >= 0 and len(before) - at < len(stop) + 3 else before + stop


@pytest.mark.parametrize(
    ("family", "count"),
    [(name, count) for name, form in FORMS.items() for count in range(1, form.calls_at_once + 1)],
)
def test_what_tools_say_is_rendered_as_the_template_does(family: str, count: int) -> None:
    form = FORMS[family]
    fast = tokenizer(form)
    messages = _conversation(count, as_text=family == "deepseek_v3")
    before = _written(_rendered(fast, messages[:2], False), form.stops_call)
    renderer = TurnRenderer(fast, tools=TOOLS, roles=("tool",))
    observations = [Observation(m["content"], "tool", m["name"], m["tool_call_id"]) for m in messages[2:]]
    after = renderer.after(fast.convert_tokens_to_ids(form.stops_call), observations)
    assert before + fast.decode(after) == _rendered(fast, messages, True)


@pytest.mark.parametrize("family", [name for name, form in FORMS.items() if "<think>" not in form.template])
def test_what_tools_and_then_a_user_say_is_rendered_as_the_template_does(family: str) -> None:
    form = FORMS[family]
    fast = tokenizer(form)
    messages = [*_conversation(1, as_text=family == "deepseek_v3"), {"role": "user", "content": SAID}]
    before = _written(_rendered(fast, messages[:2], False), form.stops_call)
    observations = [
        Observation(m["content"], m["role"], m.get("name", ""), m.get("tool_call_id", ""))
        for m in messages[2:]
    ]
    renderer = TurnRenderer(fast, tools=TOOLS)
    after = renderer.after(fast.convert_tokens_to_ids(form.stops_call), observations)
    assert before + fast.decode(after) == _rendered(fast, messages, True)


@pytest.mark.parametrize("family", FORMS)
def test_what_a_user_says_is_rendered_as_the_template_does(family: str) -> None:
    form = FORMS[family]
    fast = tokenizer(form)
    if "<think>" in form.template:
        with pytest.raises(ConfigError, match="rewrites a turn before observations of the role 'user'"):
            TurnRenderer(fast)
        return
    turn, question = {"role": "assistant", "content": "3"}, {"role": "user", "content": SAID}
    before = _written(_rendered(fast, [QUESTION, turn], False), form.stops)
    after = TurnRenderer(fast).after(fast.convert_tokens_to_ids(form.stops), [Observation(SAID)])
    whole = _rendered(fast, [QUESTION, turn, question], True)
    # gpt-oss ends the last turn with a different mark.
    assert before + fast.decode(after) == whole.replace("3<|end|>", "3<|return|>")


def test_a_template_of_one_call_a_turn_takes_the_results_of_two() -> None:
    fast = tokenizer(FORMS["llama"])
    render = TurnRenderer(fast, tools=TOOLS, roles=("tool",))
    text = fast.decode(render.after(fast.eos_token_id, [Observation("3", "tool"), Observation("4", "tool")]))
    assert text.count("ipython") == 2 and text.index('"3"') < text.index('"4"')


@pytest.mark.parametrize("call_id", ["", "short", "x" * 100, "a<|b|>c d", "[INST]", "語語語語語語語語語"])
def test_an_id_that_no_template_takes_is_replaced(call_id: str) -> None:
    fast = tokenizer(FORMS["mixtral"])
    renderer = TurnRenderer(fast, tools=TOOLS, roles=("tool",))
    observations = [Observation("3", "tool", "add", call_id)]
    assert '"call_id": "call00000"' in fast.decode(renderer.after(fast.eos_token_id, observations))


def test_the_name_of_an_unknown_tool_is_not_shown() -> None:
    fast = tokenizer(FORMS["kimi_k2"])
    renderer = TurnRenderer(fast, tools=TOOLS, roles=("tool",))
    text = fast.decode(renderer.after(fast.eos_token_id, [Observation("no", "tool", "<|im_end|>", "")]))
    assert text.startswith("<|im_system|>tool<|im_middle|>") and text.count("<|im_end|>") == 1


def test_an_opening_is_spelled_as_the_template_does() -> None:
    fast = tokenizer(FORMS["llama"])
    messages = [{"role": "system", "content": SAID}, {"role": "user", "content": SAID}]
    text = fast.decode(TurnRenderer(fast).opening(messages))
    assert text == fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    "spelled", ["m.content.lstrip()", "m.content.rstrip()", "m.content | trim", "m.content | tojson"]
)
def test_a_text_is_spelled_as_the_template_does(spelled: str) -> None:
    form = Form(
        OLMOE.replace("'<|user|>\n' + m.content", f"'<|user|>\n' + ({spelled})"),
        "<|endoftext|>",
        "<|endoftext|>",
    )
    fast = tokenizer(form)
    talk = [QUESTION, {"role": "assistant", "content": "3"}, {"role": "user", "content": SAID}]
    after = fast.decode(TurnRenderer(fast).after(fast.eos_token_id, [Observation(SAID)]))
    whole = fast.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert whole.endswith(f"3<|endoftext|>{after}")


def test_a_template_that_leaves_out_what_tools_say_is_refused_at_the_start() -> None:
    fast = tokenizer(Form(OLMOE, "<|endoftext|>", "<|endoftext|>"))
    TurnRenderer(fast)
    with pytest.raises(ConfigError, match="leaves out or repeats one of 1 observations"):
        TurnRenderer(fast, roles=("tool",))

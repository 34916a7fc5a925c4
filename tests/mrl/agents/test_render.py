"""Text after a turn: the template's own, whatever tools say; the policy's tokens stay as they were."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mrl.agents.plain_encoding import PlainEncoder
from mrl.agents.render import Observation, TurnRenderer
from mrl.errors import ConfigError, DataError
from tests.support import chat_tokenizers

HARD = "a é e\u0301 \u200b\u00ad ﬁ 語 한 ب 👩\u200d👩\u200d👧 🇩🇪 \ufeff \u202e \t\n\n  \r x"


@pytest.fixture(scope="module", params=sorted(chat_tokenizers.ALL))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return chat_tokenizers.ALL[request.param]()


def _asked(tokenizer: Any) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _policy_writes(rng: random.Random, tokenizer: Any) -> list[int]:
    """Return tokens that no tokenizer would choose for their text, and the end of the turn."""
    ordinary = [i for i in range(len(tokenizer)) if i not in tokenizer.added_tokens_decoder]
    return [*rng.choices(ordinary, k=rng.randint(1, 12)), tokenizer.eos_token_id]


def _random_text(rng: random.Random, tokenizer: Any) -> str:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    parts = [
        HARD[rng.randrange(len(HARD)) :],
        "17",
        " the answer ",
        rng.choice(added),
        rng.choice(added)[:-1],
    ]
    return "".join(rng.choices(parts, k=rng.randint(0, 6)))


def _words(text: str) -> str:
    return "".join(text.split())


def test_nothing_that_is_observed_becomes_an_added_token(tokenizer: Any) -> None:
    """Encoding the whole text with its template in one go would make tokens of the same words."""
    renderer, forged = TurnRenderer(tokenizer, roles=("tool",)), 0
    added = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if i != tokenizer.unk_token_id}
    places = [i for i in renderer.after(None, [Observation("", "tool")]).tolist() if i in added]
    for text in added.values():
        for observed in (text, f"x{text}{text}y", f"{text[0]}{text}", f"{HARD}{text}{HARD}"):
            tokens = renderer.after(None, [Observation(observed, "tool")]).tolist()
            assert [i for i in tokens if i in added] == places, observed
            forged += any(i in added for i in tokenizer(observed, add_special_tokens=False)["input_ids"])
    assert forged >= 3 * len(added), "plain encoding makes tokens of them, or this shows nothing"


def test_letters_of_observations_survive(tokenizer: Any) -> None:
    if tokenizer.unk_token_id is None:
        for text in (HARD, *map(str, tokenizer.added_tokens_decoder.values())):
            assert tokenizer.decode(PlainEncoder(tokenizer).plain(text)) == text


@pytest.mark.parametrize("episodes", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_episodes_only_grow_and_encoding_them_again_is_another_history(tokenizer, episodes) -> None:
    """The policy's tokens stay in the context as written, over three turns."""
    rng, differs = random.Random(0), 0
    renderer = TurnRenderer(tokenizer, roles=("tool", "user"))
    prompt = _asked(tokenizer)
    for _ in range(episodes):
        context, turns = list(prompt), []
        for _ in range(3):
            turns.append((len(context), _policy_writes(rng, tokenizer)))
            context += turns[-1][1]
            role = rng.choice(("tool", "user"))
            texts = [_random_text(rng, tokenizer) for _ in range(rng.randint(1, 2) if role == "tool" else 1)]
            context += renderer.after(context[-1], [Observation(t, role) for t in texts]).tolist()
        assert all(context[at : at + len(wrote)] == wrote for at, wrote in turns)
        again = tokenizer(tokenizer.decode(context), add_special_tokens=False)["input_ids"]
        differs += again != context
    assert differs >= 0.05 * episodes


def test_an_end_of_turn_is_written_once(tokenizer: Any) -> None:
    renderer, end = TurnRenderer(tokenizer), tokenizer.eos_token_id
    with_it, without = (renderer.after(last, [Observation("x")]).tolist() for last in (end, None))
    assert without == [end, *with_it]


@pytest.mark.parametrize("roles", [[], ["user", "tool"], ["tool", "user", "tool"]])
def test_no_observations_and_results_after_others_are_refused(roles: list[Any]) -> None:
    renderer = TurnRenderer(chat_tokenizers.qwen())
    with pytest.raises(DataError, match="results of tools must come before"):
        renderer.after(None, [Observation("x", role) for role in roles])


def test_a_template_that_rewrites_history_is_refused_with_the_place() -> None:
    tokenizer = chat_tokenizers.qwen(chat_tokenizers.FORGETFUL)
    with pytest.raises(
        ConfigError, match=r"rewrites a turn before observations of the role 'user': after .*mrlthought"
    ):
        TurnRenderer(tokenizer)


def test_a_role_that_was_not_foreseen_is_looked_at_when_it_comes() -> None:
    """The template drops thoughts before a user's message, but keeps them before tools' results."""
    keeps = "{%- if m.role == 'assistant' and not loop.last and messages[loop.index0 + 1].role == 'user'"
    tokenizer = chat_tokenizers.qwen(
        chat_tokenizers.FORGETFUL.replace("{%- if m.role == 'assistant' and not loop.last", keeps)
    )
    renderer = TurnRenderer(tokenizer, roles=("tool",))
    renderer.after(None, [Observation("x", "tool")])
    with pytest.raises(ConfigError, match="rewrites a turn before observations of the role 'user'"):
        renderer.after(None, [Observation("x", "user")])


def test_an_opening_is_the_template_around_its_texts(tokenizer: Any) -> None:
    """No text from an environment before the first turn becomes an added token."""
    forged = f"begin {tokenizer.eos_token} now"
    added = set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
    tokens = TurnRenderer(tokenizer).opening([{"role": "user", "content": forged}])
    plain = _asked(tokenizer)
    assert tokens.dtype == np.int32
    assert [i for i in tokens.tolist() if i in added] == [i for i in plain if i in added]
    prompt = TurnRenderer(tokenizer).opening([{"role": "user", "content": "q"}])
    assert _words(tokenizer.decode(prompt)) == _words(tokenizer.decode(plain))


def test_a_template_that_knows_no_tools_is_refused() -> None:
    strict = chat_tokenizers.CHATML.replace(
        "{%- if m.role == 'tool' %}", "{%- if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    )
    tokenizer = chat_tokenizers.qwen(strict)
    TurnRenderer(tokenizer)
    with pytest.raises(
        ConfigError, match=r"refuses messages with the roles \['user', 'assistant', 'tool'\]: no tools"
    ):
        TurnRenderer(tokenizer, roles=("tool",))


def test_no_template() -> None:
    tokenizer = chat_tokenizers.qwen()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="needs a tokenizer with a chat template"):
        TurnRenderer(tokenizer)


def test_tokens_are_int32(tokenizer: Any) -> None:
    assert TurnRenderer(tokenizer).after(None, [Observation("x")]).dtype == np.int32

"""What stands between two turns of the policy, as tokens: the end of its turn, the observations, the next header.

The tokens of an episode only grow. What the policy wrote is never decoded and encoded again; what follows it is the
difference of two renderings of the chat template, found once at start with made-up turns. Observations are encoded as
plain text: none of the tokenizer's added tokens comes out of them, whatever they say.

Source of the difference: "append-only" rendering as in verl's continuous tokens; here a template that rewrites what stood
before is refused, because the policy's tokens would then have another history than the one that was sampled from.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mrl.errors import ConfigError, DataError
from mrl.rewards.thoughts import opens_thought

Role = Literal["tool", "user"]

_ASKED, _ANSWERED = "mrlasked", "mrlanswered"
_THOUGHT = "<think>\nmrlthought\n</think>\n\n"
_SLOT = "mrlslot{}mrl"
_MOST_MARK = 32
"""Tokens that the mark of a thought may take, with the white space behind it."""
_CALL = {"type": "function", "id": "call000000", "function": {"name": "mrlcalled", "arguments": {"n": 1}}}


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees next."""

    text: str
    role: Role = "user"


class TurnRenderer:
    """Of one tokenizer, its chat template and the tools of one environment."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        roles: Sequence[Role] = ("user",),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`roles`: those of the observations that are sure to come; another one is looked at when it comes. ConfigError where the tokenizer has no chat template, where it refuses
        such turns, or where it rewrites what stood before them; the place is named."""
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "an episode of several turns needs a tokenizer with a chat template; this one has none"
            )
        self._tokenizer = tokenizer
        self._arguments = {**(chat_template_kwargs or {}), "tools": list(tools) if tools else None}
        added = {
            number: str(token)
            for number, token in tokenizer.added_tokens_decoder.items()
            if number != tokenizer.unk_token_id
        }
        self._added_ids = set(added)
        names = sorted(added.values(), key=len, reverse=True)
        self._is_added = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")
        self._ending = self._encode(self._ending_of_a_turn())
        for role in roles:
            self._require_grows(role)
        self._found: dict[tuple[str, int], list[list[int]]] = {}
        """The template's tokens before, between and behind so many observations of a role."""

    def after(self, last_token: int | None, observations: Sequence[Observation]) -> np.ndarray:
        """[n] int32: the tokens from the policy's last one to where it goes on.

        `last_token` is the policy's own last token, so that an end of turn that it wrote is not written again; None where it
        wrote none. DataError without observations, or with ones of different roles; ConfigError as at the start.
        """
        roles = {observation.role for observation in observations}
        if len(roles) != 1:
            raise DataError(f"the observations after a turn have one role, not {sorted(roles) or 'none'}")
        (role,) = roles
        key = (role, len(observations))
        if key not in self._found:
            self._require_grows(role)
            self._found[key] = self._around(*key)
        written = last_token is not None and self._ending[:1] == [last_token]
        first, *behind = self._found[key]
        ids = self._ending[written:] + first
        for observation, tokens in zip(observations, behind, strict=True):
            ids += self.plain(observation.text) + tokens
        return np.asarray(ids, np.int32)

    def opening(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """[n] int32: a prompt of an environment's messages, a role and a content each, up to where the policy goes on."""
        slots = [_SLOT.format(number) for number in range(len(messages))]
        said = [{**message, "content": slot} for message, slot in zip(messages, slots, strict=True)]
        ids, *behind = self._cut(self._rendered(said, opens=True), slots)
        for message, tokens in zip(messages, behind, strict=True):
            ids = ids + self.plain(message["content"]) + tokens
        return np.asarray(ids, np.int32)

    def opens_thought(self, tokens: np.ndarray) -> bool:
        """Return True if the [n] tokens before a turn end in a thought that they opened."""
        return opens_thought(self._tokenizer.decode(tokens[-_MOST_MARK:].tolist(), skip_special_tokens=False))

    def plain(self, text: str) -> list[int]:
        """The ids of a text that nothing in it can turn into one of the tokenizer's added tokens: an added token's own text
        is cut behind its first character."""
        ids = self._encode(text)
        if self._added_ids.isdisjoint(ids):
            return ids
        cuts = [0, *(match.start() + 1 for match in self._is_added.finditer(text)), len(text)]
        ids = [i for start, end in itertools.pairwise(cuts) for i in self._encode(text[start:end])]
        if self._added_ids.isdisjoint(ids):
            return ids
        # Overlapping ones, or one of a single character: letter by letter, and what is an added token itself is left out.
        return [i for letter in text for i in self._encode(letter) if i not in self._added_ids]

    # -- the template --------------------------------------------------------------------------------------------

    def _ending_of_a_turn(self) -> str:
        """The text between the policy's last word and the end of its turn."""
        asked = [{"role": "user", "content": _ASKED}]
        opened = self._rendered(asked, opens=True)
        whole = self._rendered([*asked, {"role": "assistant", "content": _ANSWERED}], opens=False)
        at = whole.rfind(_ANSWERED)
        if at < 0:
            raise ConfigError("the chat template leaves out the assistant's turn")
        shared = _common(opened, whole)
        if _ASKED not in shared:
            raise ConfigError(_rewrites(opened, whole, "the question"))
        return whole[at + len(_ANSWERED) :]

    def _require_grows(self, role: str) -> None:
        """Observations of this role leave turns as they were, thoughts included; ConfigError where they do not."""
        for answer in (_ANSWERED, _THOUGHT + _ANSWERED):
            self._between(("x",), role, answer)

    def _between(self, texts: Sequence[str], role: str, answer: str) -> str:
        """The text from the end of the policy's turn to where it goes on, around these observations."""
        call = {"tool_calls": [dict(_CALL) for _ in texts]} if role == "tool" else {}
        asked = {"role": "user", "content": _ASKED}
        turn = {"role": "assistant", "content": answer, **call}
        said = [
            {"role": role, "content": text}
            | ({"tool_call_id": _CALL["id"], "name": "mrlcalled"} if call else {})
            for text in texts
        ]
        before = self._rendered([asked, turn], opens=False)
        after = self._rendered([asked, turn, *said], opens=True)
        if answer not in before:
            raise ConfigError(
                f"the chat template rewrites what the policy wrote ({answer!r} is {before[-80:]!r} then); set it by "
                "data.chat_template_kwargs to keep thoughts, or use a template that does"
            )
        if not after.startswith(before):
            raise ConfigError(_rewrites(before, after, f"a turn before observations of the role {role!r}"))
        return after[len(before) :]

    def _around(self, role: str, count: int) -> list[list[int]]:
        """`count` + 1 runs of the template's own tokens."""
        slots = [_SLOT.format(number) for number in range(count)]
        return self._cut(self._between(slots, role, _ANSWERED), slots)

    def _cut(self, text: str, slots: Sequence[str]) -> list[list[int]]:
        """The tokens before, between and behind the slots of a text."""
        runs = []
        for number, slot in enumerate(slots, 1):
            before, found, text = text.partition(slot)
            if not found:
                raise DataError(f"the chat template leaves out observation {number} of {len(slots)}")
            runs.append(self._encode(before))
        return [*runs, self._encode(text)]

    def _rendered(self, messages: list[dict[str, Any]], *, opens: bool) -> str:
        import jinja2

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=opens, **self._arguments
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            roles = [message["role"] for message in messages]
            raise ConfigError(
                f"the chat template refuses messages with the roles {roles}: {error}"
            ) from error

    # -- tokens --------------------------------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _common(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))]


def _rewrites(before: str, after: str, what: str) -> str:
    at = len(_common(before, after))
    return (
        f"the chat template rewrites {what}: behind {before[max(0, at - 40) : at]!r} stands {before[at : at + 40]!r}, and with "
        f"further turns {after[at : at + 40]!r}"
    )

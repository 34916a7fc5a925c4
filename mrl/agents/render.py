"""Render the tokens between two turns of the policy: the end of its turn, the observations, the next header.

An episode's tokens only grow. The policy's tokens are never decoded and encoded again; the tokens after them
are the difference of two renderings of the chat template, found once at start with dummy turns. Observations
are encoded as plain text: none of the tokenizer's added tokens comes out of them, whatever they contain.

The difference is "append-only" rendering, as in verl's continuous tokens. A template that rewrites earlier
turns is refused: the policy's tokens would have another history than the one they were sampled from."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mrl.agents.plain_encoding import PlainEncoder
from mrl.data.messages import with_system
from mrl.data.templates import TEMPLATE_ERRORS, apply_template
from mrl.errors import ConfigError, DataError
from mrl.rewards.thoughts import opens_thought

Role = Literal["tool", "user", "system"]

_ASKED, _ANSWERED = "mrlasked", "mrlanswered"
_THOUGHT = "<think>\nmrlthought\n</think>\n\n"
_SLOT = "mrlslot{}mrl"
_MOST_MARK = 32
"""Most tokens of a thought's mark, with the white space after it."""
_SLOTS = re.compile(r"mrlslot(\d+)mrl")
_PROBE = ' \n"mrl\\probe"\tü\n '
_CALLED = "tool"
"""Name of a tool that does not exist."""
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_MOST_PROBED = 16
"""Most messages of an opening of which each is probed."""
_FRAMES = 4096
"""Most frames to keep; a template that shows ids has one per id."""

_SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda text: text,
    lambda text: text.lstrip(),
    lambda text: text.rstrip(),
    lambda text: text.strip(),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text.strip(), ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
"""What templates make of a message's text: unchanged, stripped before, after or on both sides, or as JSON."""


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """Next input of the policy."""

    text: str
    role: Role = "user"
    name: str = ""
    """Tool that returned it, which some templates show."""
    id: str = ""
    """Id that the policy gave the call, which some templates show."""


class _Shape(NamedTuple):
    """Role, name and id of an observation: all but its text."""

    role: str
    name: str = ""
    id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    """The template's tokens around a number of observations."""

    ending: list[int]
    """Tokens that end the policy's last turn; the first run begins with them, or with what replaces them."""
    runs: list[list[int]]
    """Tokens before, between and after the observations."""
    spell: dict[str, Callable[[str], str]]
    """What the template makes of the texts of each role."""


class TurnRenderer:
    """Renderer for one tokenizer, its chat template and the tools of one environment."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        system: str | None = None,
        roles: Sequence[Role] = ("user",),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the template with these roles.

        Args:
            system: Text that shows the tools in an opening's system message; None if the template shows them.
            roles: Roles of observations that are sure to come; another role is checked when it comes.

        Raises:
            ConfigError: The template is missing, refuses such turns or rewrites earlier ones; says where.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "an episode of several turns needs a tokenizer with a chat template; this one has none"
            )
        self._tokenizer = tokenizer
        self._system = system or ""
        self._encoder = PlainEncoder(tokenizer)
        in_template = self._encoder.protected(list(tools)) if tools and system is None else None
        self._arguments = {**(chat_template_kwargs or {}), "tools": in_template}
        self._ending = self._ending_of_a_turn()
        self._names = [str(tool.get("function", tool).get("name", "")) for tool in tools or ()]
        self._frames: dict[tuple[_Shape, ...], _Frame] = {}
        self._openings: dict[tuple[str, ...], list[Callable[[str], str]]] = {}
        """What the template makes of the texts of messages, by their roles."""
        self._known: set[tuple[str, ...]] = set()
        for role in roles:
            self._frame([_Shape(role)])

    def after(self, last_token: int | None, observations: Sequence[Observation]) -> np.ndarray:
        """Return the tokens after the policy's last one up to its next turn: [n] int32.

        `last_token`: the policy's last token, so that an end of turn that it wrote is not repeated; None if
        it wrote none. Raise DataError without observations, or if results of tools come after others;
        ConfigError as at the start.
        """
        roles = [observation.role for observation in observations]
        if not roles or "tool" in roles[roles.count("tool") :]:
            raise DataError(
                f"results of tools must come before other observations after a turn, not {roles or 'nothing'}"
            )
        frame = self._frame([_Shape(one.role, one.name, one.id) for one in observations])
        first, *suffixes = frame.runs
        ids = self._unwritten(last_token, frame.ending, first)
        for observation, tokens in zip(observations, suffixes, strict=True):
            ids += self._encoder.plain(frame.spell[observation.role](observation.text)) + tokens
        return np.asarray(ids, np.int32)

    def _unwritten(self, last_token: int | None, ending: list[int], first: list[int]) -> list[int]:
        """Return the tokens before an observation that the policy has not written itself.

        It may have written the end of its turn (`ending`), or the next turn's mark if no mark ends turns."""
        if last_token in self._encoder.added_ids | set(ending[:1]):
            if last_token in ending:
                written = ending.index(last_token) + 1
                if first[:written] == ending[:written]:
                    return first[written:]
                return ending[written:] + first[len(ending) :]
            if not ending and first[:1] == [last_token]:
                return first[1:]
        return list(first)

    def opening(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """Return the prompt of an environment's messages, up to the policy's turn: [n] int32."""

        messages = with_system(messages, self._system)
        shown = [self._encoder.protected({**message, "content": ""}) for message in messages]

        def rendered(texts: Sequence[str]) -> str:
            filled = [{**message, "content": text} for message, text in zip(shown, texts, strict=True)]
            return self._rendered(filled, opens=True)

        roles = tuple(message["role"] for message in messages)
        ids, *suffixes = self._cut(rendered([_SLOT.format(n) for n in range(len(messages))]), len(messages))
        if roles not in self._openings:
            if len(self._openings) >= _FRAMES:
                self._openings.clear()

            def spelling(n: int) -> Callable[[str], str]:
                return self._spelling(rendered(["x"] * n + [_PROBE] + ["x"] * (len(roles) - n - 1)), roles[n])

            if len(roles) <= _MOST_PROBED:
                self._openings[roles] = [spelling(n) for n in range(len(roles))]
            else:
                self._openings[roles] = _by_role(roles, spelling)
        for message, spell, tokens in zip(messages, self._openings[roles], suffixes, strict=True):
            ids = ids + self._encoder.plain(spell(message["content"])) + tokens
        return np.asarray(ids, np.int32)

    def whole(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the prompt of messages that the template does not show one by one (calls without text, turns
        that it joins): [n] int32. Raise ConfigError if the template refuses them."""
        shown = self._encoder.protected(list(with_system(messages, self._system)))
        return np.asarray(self._encoder.encode(self._rendered(shown, opens=True)), np.int32)

    def opens_thought(self, tokens: np.ndarray) -> bool:
        """Return True if the [n] tokens before a turn end in a thought that they opened."""
        return opens_thought(self._tokenizer.decode(tokens[-_MOST_MARK:].tolist(), skip_special_tokens=False))

    def hidden_tools(self) -> list[str]:
        """Return the names of the tools that the template was given and does not show."""
        if not self._arguments["tools"]:
            return []
        text = self._rendered([{"role": "user", "content": _ASKED}], opens=True)
        return [name for name in self._names if name not in text]

    # -- the template ----------------------------------------------------------------------------------------

    def _ending_of_a_turn(self) -> str:
        """Return the text between the policy's last word and the end of its turn."""
        question = [{"role": "user", "content": _ASKED}]
        opened = self._rendered(question, opens=True)
        whole = self._rendered([*question, {"role": "assistant", "content": _ANSWERED}], opens=False)
        at = whole.rfind(_ANSWERED)
        if at < 0:
            raise ConfigError("the chat template leaves out the assistant's turn")
        shared = _common(opened, whole)
        if _ASKED not in shared:
            raise ConfigError(_rewrites(opened, whole, "the question"))
        return whole[at + len(_ANSWERED) :]

    def _require_grows(self, shapes: Sequence[_Shape]) -> None:
        """Raise ConfigError if observations of these roles change earlier turns, or their thoughts."""
        roles = tuple(role for role, _ in itertools.groupby(shape.role for shape in shapes))
        if roles in self._known:
            return
        keeps = roles[0] != "tool" or self._has_text
        for answer in (_ANSWERED, _THOUGHT + _ANSWERED) if keeps else ("",):
            self._between(["x"] * len(roles), [_Shape(role) for role in roles], answer)
        self._known.add(roles)

    def _frame(self, shapes: Sequence[_Shape]) -> _Frame:
        """Return the frame around observations with these roles, names and ids."""
        self._require_grows(shapes)
        key = tuple(
            shape._replace(id=shape.id if self._may_show(shape.id) else "")
            if shape.role == "tool"
            else _Shape(shape.role)
            for shape in shapes
        )
        if key not in self._frames:
            if len(self._frames) >= _FRAMES:
                self._frames.clear()
            self._frames[key] = self._around(key)
        return self._frames[key]

    def _around(self, shapes: Sequence[_Shape]) -> _Frame:
        answer = _ANSWERED if shapes[0].role != "tool" or self._has_text else ""
        slots = [_SLOT.format(number) for number in range(len(shapes))]
        try:
            ending, text = self._between(slots, shapes, answer)
        except ConfigError:
            if not any(shape.id for shape in shapes):
                raise
            shapes = [shape._replace(id="") for shape in shapes]  # the template rejects the policy's ids
            ending, text = self._between(slots, shapes, answer)
        runs, spell = self._cut(text, len(slots)), dict[str, Callable[[str], str]]()
        for place, shape in enumerate(shapes):
            if shape.role not in spell:
                probed = [*slots[:place], _PROBE, *slots[place + 1 :]]
                spell[shape.role] = self._spelling(self._between(probed, shapes, answer)[1], shape.role)
        return _Frame(self._encoder.encode(ending), runs, spell)

    def _between(self, texts: Sequence[str], shapes: Sequence[_Shape], answer: str) -> tuple[str, str]:
        """Return (the end of the policy's last turn, the text from there to the policy's next turn).

        The second begins with the first, or with what replaces it, and contains these observations."""
        question = {"role": "user", "content": _ASKED}
        calls = list[dict[str, Any]]()
        observations = list[dict[str, Any]]()
        for number, (text, (role, name, call_id)) in enumerate(zip(texts, shapes, strict=True)):
            observations.append({"role": role, "content": text})
            if role == "tool":
                name, call_id = name if name in self._names else _CALLED, call_id or f"call{number:05d}"
                observations[-1] |= {"tool_call_id": call_id, "name": name}
                calls.append(_call(call_id, name))
        if not calls:
            turn: dict[str, Any] = {"role": "assistant", "content": answer}
            before, after = self._grown([question, turn], observations, answer)
            return before[_end_of_answer(before) :], after[_end_of_answer(after) :]
        try:
            before, after = self._grown([question, self._turn(answer, calls)], observations, answer)
        except ConfigError:
            if len(calls) == 1:
                raise
            # The template takes one call per turn, and any number of results.
            before, after = self._grown([question, self._turn(answer, calls[:1])], observations, answer)
        ending = self._ending if before.endswith(self._ending) else self._last_mark(before)
        return ending, ending + after[len(before) :]

    def _grown(
        self, turns: list[dict[str, Any]], observations: list[dict[str, Any]], answer: str
    ) -> tuple[str, str]:
        """Return the conversation before and after the observations; ConfigError if earlier text changes."""
        before = self._rendered(turns, opens=False)
        after = self._rendered([*turns, *observations], opens=True)
        roles = list(dict.fromkeys(one["role"] for one in observations))
        kept = before if "tool" in roles else before[: _end_of_answer(before)]
        if _squeezed(answer) not in _squeezed(before):
            raise ConfigError(
                f"the chat template rewrites what the policy wrote ({answer!r} becomes {before[-80:]!r}); "
                "set data.chat_template_kwargs so that it keeps thoughts, or use a template that does"
            )
        if not after.startswith(kept):
            part = f"a turn before observations of the role {' and '.join(map(repr, roles))}"
            raise ConfigError(_rewrites(before, after, part))
        return before, after

    def _turn(self, answer: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"role": "assistant", "content": answer, "tool_calls": calls}

    @functools.cached_property
    def _has_text(self) -> bool:
        """True if the template shows the text of a turn with calls; some leave it out, or refuse it."""
        turn = self._turn(_ANSWERED, [_call("call00000", _CALLED)])
        try:
            return _ANSWERED in self._rendered([{"role": "user", "content": _ASKED}, turn], opens=False)
        except ConfigError:
            return False

    @functools.cached_property
    def _shows_ids(self) -> bool:
        answer = _ANSWERED if self._has_text else ""
        one, other = (
            self._between(["x"], [_Shape("tool", id=call_id)], answer)
            for call_id in ("call00000", "call00001")
        )
        return one != other

    def _may_show(self, call_id: str) -> bool:
        """Return True if the template gets an id of the policy: plain characters, and ids are shown."""
        return bool(_ID.fullmatch(call_id)) and self._shows_ids and not self._encoder.added.search(call_id)

    def _last_mark(self, text: str) -> str:
        """Return the text from its last added token on; empty unless only space follows that token."""
        marks = list(self._encoder.added.finditer(text))
        return text[marks[-1].start() :] if marks and not text[marks[-1].end() :].strip() else ""

    def _spelling(self, text: str, role: str) -> Callable[[str], str]:
        """Return what the template did to the probe in this text."""
        for spell in _SPELLINGS:
            if spell(_PROBE) in text:
                return spell
        raise ConfigError(
            f"the chat template rewrites or leaves out the text of messages of the role {role!r}"
        )

    def _cut(self, text: str, count: int) -> list[list[int]]:
        """Return the tokens before, between and after the slots of a text."""
        parts = _SLOTS.split(text)
        if parts[1::2] != [str(number) for number in range(count)]:
            raise ConfigError(f"the chat template leaves out or repeats one of {count} observations")
        return [self._encoder.encode(part) for part in parts[::2]]

    def _rendered(self, messages: list[dict[str, Any]], *, opens: bool) -> str:
        try:
            return apply_template(self._tokenizer, messages, add_generation_prompt=opens, **self._arguments)
        except TEMPLATE_ERRORS as error:
            roles = [message["role"] for message in messages]
            raise ConfigError(
                f"the chat template refuses messages with the roles {roles}: {error}"
            ) from error


def _by_role(
    roles: Sequence[str], spelling: Callable[[int], Callable[[str], str]]
) -> list[Callable[[str], str]]:
    """Return what the template makes of each message's text, by each role's first and last message.

    Raise ConfigError if these differ."""
    last = {role: n for n, role in enumerate(roles)}
    first = {role: roles.index(role) for role in last}
    of_role = {role: spelling(n) for role, n in first.items()}
    if any(spelling(n) is not of_role[role] for role, n in last.items() if n != first[role]):
        raise ConfigError("the chat template treats messages of one role differently")
    return [of_role[role] for role in roles]


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": {"n": 1}}}


def _end_of_answer(text: str) -> int:
    return text.rfind(_ANSWERED) + len(_ANSWERED)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _common(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))]


def _rewrites(before: str, after: str, part: str) -> str:
    at = len(_common(before, after))
    return (
        f"the chat template rewrites {part}: after {before[max(0, at - 40) : at]!r} it has "
        f"{before[at : at + 40]!r}, and with further turns {after[at : at + 40]!r}"
    )

"""Verifier `reward_model`: a sequence classifier behind vLLM's pooling server (POST {url}/classify).

The score of its single label is the reward. The conversation is sent as token ids, made here with the model's
own template, so that the policy's text cannot contain control tokens.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, RewardError
from mrl.reward_labels import SCORED, require_one_score
from mrl.rewards.contract import RewardRequest, checked_value, scored
from mrl.rewards.judges.endpoint import Endpoint
from mrl.rewards.judges.judge_cache import JudgeCache, check_budget, json_digest
from mrl.rewards.judges.question import content_text
from mrl.rewards.judges.untrusted import ControlStrings
from mrl.rewards.reward_part import RewardPart
from mrl.samples import Verdict
from mrl.tokenizer_folder import from_folder, writing_date


class RewardModelVerifier:
    """Verifier that calls a server's classification."""

    name = "reward_model"
    waits = True

    def __init__(self, part: RewardPart, conversation: ConversationEncoder, folder: Path | None) -> None:
        self._server, self._conversation = part.server, conversation
        identity = ("reward_model", Endpoint.identity(part), part.server.model, conversation.version)
        self.version = json_digest(*identity)[:12]
        self._ledger = JudgeCache(folder, self.version)
        self._endpoint = Endpoint.of(part)

    async def score(self, request: RewardRequest) -> Verdict:
        ids, control_strings = self._conversation.ids(request)
        score = await self._score(request, ids)
        return scored(score, score=score, control_strings=float(control_strings))

    async def _score(self, request: RewardRequest, ids: list[int]) -> float:
        """Return the cached score of the request's messages, or the server's score of `ids`."""
        key = json_digest(self._conversation.messages(request))
        if (cached := self._ledger.find(key)) is not None:
            return cached
        check_budget(self._server, self._ledger)
        body: dict[str, Any] = {"input": ids, "use_activation": False}
        if self._server.model:
            body["model"] = self._server.model
        score = _read_score(await self._endpoint.post("/classify", body))
        self._ledger.record(len(ids), key, score)
        return score


class ConversationEncoder:
    """Tokenizer of conversations for the reward model in a folder."""

    def __init__(self, folder: str, *, date: datetime.date | None = None) -> None:
        """Read the folder; `date` is today's date for its chat template. Raises ConfigError if it is not a
        reward model with one score at a distinct end token."""
        config = _checked_config(Path(folder))
        try:
            self.tokenizer = writing_date(from_folder(folder), date or datetime.date.today())
        except Exception as error:  # each file format's reader raises its own errors
            raise ConfigError(f"server.tokenizer = {folder!r}: {error}".splitlines()[0]) from error
        self._controls = ControlStrings.of_folder(folder)
        self._template = getattr(self.tokenizer, "chat_template", None)
        self._end = config["eos_token_id"]
        self._last = _about(Path(folder)).get("end_tokens", [])
        self._opening = _opening_tokens(self.tokenizer)
        vocabulary = (Path(folder) / "tokenizer.json").read_text()
        self.version = json_digest(config, self._template, vocabulary, self._last, self._opening)

    def ids(self, request: RewardRequest) -> tuple[list[int], int]:
        """Return the token ids of prompt and response, and the number of control strings in the response.

        Without a chat template they are the tokenizer's opening tokens, both texts, and the end token. A
        model that `mrl tune` trained has its score at the response's end token, so what its template writes
        after it is dropped.
        """
        response, control_strings = self._controls.defuse(request.response)
        before, lead, after = self.tokens_around_response(request)
        return [*before, *self._encoded(lead + response), *after], control_strings

    def tokens_around_response(self, request: RewardRequest) -> tuple[list[int], str, list[int]]:
        """Return the tokens before the response, the space to encode with it, and the tokens after it."""
        if not self._template:
            prompt = self._controls.defuse(request.prompt)[0]
            return [*self._opening, *self._encoded(prompt)], "", [self._end]
        return self._by_template([*self.messages(request)[:-1], ("assistant", "")])

    def messages(self, request: RewardRequest) -> list[tuple[str, str]]:
        """Return (role, text) of each message as the model sees it; the last is the response."""
        chat = request.messages if self._template else ()
        messages = chat or ({"role": "user", "content": request.prompt},)
        texts = [(str(m.get("role", "user")), content_text(m.get("content"))) for m in messages]
        return [
            (role, self._controls.defuse(text)[0]) for role, text in (*texts, ("assistant", request.response))
        ]

    def _by_template(self, turns: Sequence[tuple[str, str]]) -> tuple[list[int], str, list[int]]:
        """Return what the chat template puts around the text of the last message.

        The template is rendered with marks in place of the texts. Each text is then encoded alone, with the
        white space before it, because a tokenizer may merge that with the text's first word.
        """
        marks = [f"mark{secrets.token_hex(8)}" for _ in turns]
        messages = [{"role": role, "content": mark} for (role, _), mark in zip(turns, marks, strict=True)]
        remaining = self.tokenizer.apply_chat_template(messages, tokenize=False)
        ids, lead = list[int](), ""
        for (_, text), mark in zip(turns, marks, strict=True):
            before, separator, remaining = remaining.partition(mark)
            if not separator:
                raise RewardError("the reward model's chat template drops a message")
            lead = before[len(before.rstrip()) :]
            ids += self._encoded(before.rstrip())
            if mark != marks[-1]:
                ids += self._encoded(lead + text)
        return ids, lead, self._up_to_the_end(self._encoded(remaining))

    def _up_to_the_end(self, closing: list[int]) -> list[int]:
        """Cut the template's tokens after the response at the score's position."""
        if not self._last:
            return closing
        ends = [place for place, token in enumerate(closing) if token in self._last]
        if not ends:
            raise RewardError("the reward model's chat template writes no end token after a response")
        return closing[: ends[-1] + 1]

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []


def _about(folder: Path) -> dict[str, Any]:
    """Read reward_model.json, which `mrl tune` writes with the model's end tokens; {} for other folders."""
    try:
        return json.loads((folder / "reward_model.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'reward_model.json'}: {error}") from error


def _opening_tokens(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text."""
    plain, opened = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    starts = range(len(opened) - len(plain) + 1)
    first = next((start for start in starts if opened[start : start + len(plain)] == plain), 0)
    return opened[:first]


def _checked_config(folder: Path) -> dict[str, Any]:
    """Read and check the folder's config.json. If padding and end are the same token, transformers scores the
    token before the end, and vLLM the end."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"server.tokenizer = {str(folder)!r}: config.json: {error}") from error
    names = config.get("architectures") or [""]
    if not str(names[0]).endswith(SCORED):
        raise ConfigError(f"server.tokenizer = {str(folder)!r} is {names[0]}, not a ...{SCORED}")
    pad, end = config.get("pad_token_id"), config.get("eos_token_id")
    if not isinstance(end, int) or pad is None or pad == end:
        raise ConfigError(
            f"server.tokenizer = {str(folder)!r}: config.json has pad_token_id = {pad} and eos_token_id = "
            f"{end}; set two different tokens, or the score is read at a position that was not trained"
        )
    require_one_score(config, source=f"server.tokenizer = {str(folder)!r}")
    return config


def _read_score(reply: dict[str, Any]) -> float:
    try:
        (row,) = reply["data"]
        (value,) = row["probs"]
    except (KeyError, TypeError, ValueError) as error:
        raise RewardError(f"the reward model's reply is not one number: {str(reply)[:120]!r}") from error
    return checked_value(value, verifier="reward_model")

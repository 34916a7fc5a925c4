"""A sequence classifier behind vLLM's pooling server (POST {url}/classify): the number of its one label is the reward.

The conversation goes out as token ids, made here with the model's own template, so that what a policy wrote is
plain text to it.
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
    """Asks a server's classification."""

    name = "reward_model"
    waits = True

    def __init__(
        self,
        part: RewardPart,
        conversation: ConversationEncoder,
        folder: Path | None,
    ) -> None:
        self._server, self._conversation = part.server, conversation
        who = ("reward_model", Endpoint.who(part), part.server.model, conversation.version)
        self.version = json_digest(*who)[:12]
        self._ledger = JudgeCache(folder, self.version)
        self._endpoint = Endpoint.of(part)

    async def score(self, request: RewardRequest) -> Verdict:
        ids, found = self._conversation.ids(request)
        score = await self._score(request, ids)
        return scored(score, score=score, control_strings=float(found))

    async def _score(self, request: RewardRequest, ids: list[int]) -> float:
        """The server's number for the request's tokens, or what it gave before to what the request says."""
        key = json_digest(self._conversation.said(request))
        if (known := self._ledger.find(key)) is not None:
            return known
        check_budget(self._server, self._ledger)
        body: dict[str, Any] = {"input": ids, "use_activation": False}
        if self._server.model:
            body["model"] = self._server.model
        found = _read_score(await self._endpoint.post("/classify", body))
        self._ledger.note(len(ids), key, found)
        return found


class ConversationEncoder:
    """Makes the ids that a reward model of a folder reads."""

    def __init__(self, folder: str, *, date: datetime.date | None = None) -> None:
        """`date`: what the chat template writes where it asks for today's. ConfigError for a folder that holds no reward model whose
        scores mean what they seem to."""
        config = _checked_config(Path(folder))
        try:
            self.tokenizer = writing_date(from_folder(folder), date or datetime.date.today())
        except Exception as error:  # what the readers of each kind of file raise
            raise ConfigError(f"server.tokenizer = {folder!r}: {error}".splitlines()[0]) from error
        self._controls = ControlStrings.of_folder(folder)
        self._template = getattr(self.tokenizer, "chat_template", None)
        self._end = config["eos_token_id"]
        self._last = _about(Path(folder)).get("end_tokens", [])
        self._opening = _opening_tokens(self.tokenizer)
        vocabulary = (Path(folder) / "tokenizer.json").read_text()
        self.version = json_digest(config, self._template, vocabulary, self._last, self._opening)

    def ids(self, request: RewardRequest) -> tuple[list[int], int]:
        """The tokens of prompt and response by the chat template, or, where the folder has none, the tokenizer's opening
        tokens, both as they are and the end token; and how many control strings the response had.

        What `mrl tune` trained has its score at the response's end token: what a template writes after it is left out."""
        response, found = self._controls.defuse(request.response)
        before, lead, after = self.around(request)
        return [*before, *self._encoded(lead + response), *after], found

    def around(self, request: RewardRequest) -> tuple[list[int], str, list[int]]:
        """The tokens before the response's own, the white space that is tokenised with the response, and the tokens after it."""
        if not self._template:
            prompt = self._controls.defuse(request.prompt)[0]
            return [*self._opening, *self._encoded(prompt)], "", [self._end]
        return self._by_template([*self.said(request)[:-1], ("assistant", "")])

    def said(self, request: RewardRequest) -> list[tuple[str, str]]:
        """Return (role, text) of each message, the response the last, as far as the model is shown them."""
        shown = request.messages if self._template else ()
        messages = shown or ({"role": "user", "content": request.prompt},)
        texts = [(str(m.get("role", "user")), content_text(m.get("content"))) for m in messages]
        return [
            (role, self._controls.defuse(text)[0]) for role, text in (*texts, ("assistant", request.response))
        ]

    def _by_template(self, said: Sequence[tuple[str, str]]) -> tuple[list[int], str, list[int]]:
        """What is around the text of the last message. The template is rendered around marks, and each text is encoded by itself in
        its mark's place, with the white space before it: a tokenizer may make one token of that and the text's first word."""
        marks = [f"mark{secrets.token_hex(8)}" for _ in said]
        messages = [{"role": role, "content": mark} for (role, _), mark in zip(said, marks, strict=True)]
        rest = self.tokenizer.apply_chat_template(messages, tokenize=False)
        ids, lead = list[int](), ""
        for (_, text), mark in zip(said, marks, strict=True):
            before, there, rest = rest.partition(mark)
            if not there:
                raise RewardError("the reward model's chat template leaves a message out")
            lead = before[len(before.rstrip()) :]
            ids += self._encoded(before.rstrip())
            if mark != marks[-1]:
                ids += self._encoded(lead + text)
        return ids, lead, self._up_to_the_end(self._encoded(rest))

    def _up_to_the_end(self, closing: list[int]) -> list[int]:
        """Of what the template writes after the response, that up to the place of the score."""
        if not self._last:
            return closing
        ends = [place for place, token in enumerate(closing) if token in self._last]
        if not ends:
            raise RewardError("the reward model's chat template writes no end token after a response")
        return closing[: ends[-1] + 1]

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []


def _about(folder: Path) -> dict[str, Any]:
    """What the folder says of its score beside config.json: the tokens that end what the model was trained on; nothing of a folder
    from elsewhere."""
    try:
        return json.loads((folder / "reward_model.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'reward_model.json'}: {error}") from error


def _opening_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer writes before a text."""
    plain, opened = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
    starts = range(len(opened) - len(plain) + 1)
    first = next((start for start in starts if opened[start : start + len(plain)] == plain), 0)
    return opened[:first]


def _checked_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. With one token for padding and for the end, transformers scores the token before
    the end, and vLLM the end."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"server.tokenizer = {str(folder)!r}: config.json: {error}") from error
    names = config.get("architectures") or [""]
    if not str(names[0]).endswith(SCORED):
        raise ConfigError(f"server.tokenizer = {str(folder)!r} is {names[0]}, no ...{SCORED}")
    pad, end = config.get("pad_token_id"), config.get("eos_token_id")
    if not isinstance(end, int) or pad is None or pad == end:
        raise ConfigError(
            f"server.tokenizer = {str(folder)!r}: pad_token_id = {pad} and eos_token_id = {end} in config.json; they are two "
            "different tokens, or the score is of another place than it was trained at"
        )
    require_one_score(config, what=f"server.tokenizer = {str(folder)!r}")
    return config


def _read_score(reply: dict[str, Any]) -> float:
    """The one number of the reply."""
    try:
        (row,) = reply["data"]
        (value,) = row["probs"]
    except (KeyError, TypeError, ValueError) as error:
        raise RewardError(f"the reward model's answer is not one number: {str(reply)[:120]!r}") from error
    return checked_value(value, verifier="reward_model")

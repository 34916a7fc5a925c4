"""Texts are those of whole responses, in how many requests and on how many engines they may have come."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mrl.rollout.drafts import Drafts, whole_sample
from mrl.rollout.request import GenerationRequest, Response, Round, Sampling
from mrl.rollout.texts import Texts
from mrl.samples import Prompt, Status
from tests.support.samples import make_response

TEXT = "3 é 😀"
TOKENS = list(TEXT.encode())
"""A token is a byte: a character lies across several."""


def decode(rows: list[np.ndarray]) -> list[str]:
    return [bytes(row.tolist()).decode(errors="replace") for row in rows]


def asked(prompt: Prompt) -> GenerationRequest:
    return Round.of([prompt], Sampling(1, 1.0, 20, 0)).requests()[0]


@pytest.mark.parametrize("cut", range(1, len(TOKENS)))
def test_a_response_of_two_engines_is_one_text(cut: int) -> None:
    prompt = Prompt(0, np.array([7], np.int32), "", None)
    drafts, request = Drafts(0), asked(prompt)
    drafts.ask([request])
    first, second = Texts(decode), Texts(decode)
    first.expect([request])
    parked = first.told([make_response(request, TOKENS[:cut], status=Status.PARKED)])
    assert [r.text for r in parked] == [""] and drafts.take(parked) == []
    (again,) = drafts.resubmit()
    second.expect([again])
    (whole,) = drafts.take(second.told([make_response(again, TOKENS[cut:])]))
    assert whole.text == TEXT == whole_sample(prompt, 0, whole).response_text


def test_what_comes_back_is_forgotten() -> None:
    """Parked, ended or stopped: a later request of the same name goes on from its own tokens alone."""
    prompt = Prompt(0, np.array([7], np.int32), "", None)
    request, texts = asked(prompt), Texts(decode)
    later = dataclasses.replace(request, own_tokens=np.array(TOKENS[:1], np.int32), attempt=1)
    for status, expected in ((Status.PARKED, ""), (Status.FINISHED, "3!"), (Status.ABORTED, "3!")):
        texts.expect([later])
        (told,) = texts.told([make_response(later, [ord("!")], status=status)])
        assert told.text == expected
        (told,) = texts.told([make_response(request, [ord("?")])])
        assert told.text == "?"
    assert texts.told([Response.empty("0.0", Status.ABORTED)])[0].text == "" and texts.told([]) == []

"""Truncated sampling and stop texts on a real engine: what is drawn and reported, where responses end."""

import dataclasses
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, uses_fast_detokenizer

from mrl.config.sections.rollout import RolloutSection
from mrl.data.tokenise import decoder
from mrl.prepare.tokenizer import write_characters
from mrl.rollout import vllm_convert
from mrl.rollout.request import Completion, GenerationRequest
from mrl.samples import Status
from tests.engines import ENGINE_SHAPE, EngineHost
from tests.mrl.rollout import driving
from tests.tiny_models import VOCAB, write_model

pytestmark = pytest.mark.integration
CHARACTERS = "ab" + "".join(chr(0x4E00 + n) for n in range(VOCAB - 5))
STOPS = ("b", *(f"a{c}" for c in CHARACTERS[2:80]))
"""One text of one token, and many of two."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model whose tokens are characters, padding, end and unknown."""
    folder = write_model(tmp_path_factory.mktemp("sampling"), **ENGINE_SHAPE)
    (folder / "text.jsonl").write_text(json.dumps({"text": CHARACTERS}) + "\n")
    assert write_characters([folder / "text.jsonl"], folder) == VOCAB
    return folder


@pytest.fixture(scope="module")
def truncating(model: Path) -> Iterator[EngineHost]:
    host = EngineHost(
        rollout=RolloutSection(
            dtype="float32",
            enforce_eager=True,
            kv_cache_bytes=64 << 20,
            max_num_seqs=64,
            top_p=0.9,
            stop=STOPS,
            stop_token_ids=(2,),
        ),
        model_path=str(model),
        max_length=160,
        seed=1,
        stop_token_ids=(1,),
        real_weights=True,
    )
    yield host
    host.close()


def ranks_and_mass(
    model: Path, request: GenerationRequest, answer: Completion
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return per token: the number and mass of likelier tokens, and its probability / the largest."""
    policy = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.tensor(np.concatenate([request.prompt_tokens, answer.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        p = policy(tokens).logits[0, len(request.prompt_tokens) - 1 : -1].softmax(-1)
    drawn = p.gather(1, torch.tensor(answer.tokens).long()[:, None])
    likelier = p > drawn
    return likelier.sum(-1).numpy(), (p * likelier).sum(-1).numpy(), (drawn[:, 0] / p.max(-1).values).numpy()


TRUNCATIONS = [
    {"top_p": 0.9},
    {"top_k": 7},
    {"min_p": 0.3},
    {"top_p": 0.5, "top_k": 20},
    {"top_p": 0.8, "temperature": 0.6},
]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_truncated_samples_carry_their_masks_and_the_log_probs_over_them(
    truncating: EngineHost, model: Path, truncation: dict[str, float]
) -> None:
    """Also where responses are paused in the middle, next to requests without truncation."""
    requests = driving.requests(16, seed=21, max_tokens=12, ignore_stop=True, **truncation)
    others = [dataclasses.replace(request, request_id=f"{n + 50}.0", top_p=1.0, top_k=0, min_p=0.0)
              for n, request in enumerate(requests[:4])]  # fmt: skip
    for function, options in ((driving.generate, ()), (driving.in_segments, (5,))):
        both = truncating.call(function, [*requests, *others], *options)
        answers, whole = both[: len(requests)], both[len(requests) :]
        for request, answer in zip(requests, answers, strict=True):
            assert answer.sampling_masks is not None, request.request_id
            assert len(answer.sampling_masks.counts) == len(answer.tokens) == 12
            assert answer.sampling_masks.counts.min() > 0
        assert min(answer.sampling_masks.counts.min() for answer in answers) < VOCAB
        assert driving.worst_gap(model, requests, answers) < 1e-4
        assert driving.worst_gap(model, others, whole) < 1e-4
    check_drawn(model, requests, answers, truncation)


def check_drawn(
    model: Path, requests: list[GenerationRequest], answers: list[Completion], truncation: dict[str, float]
) -> None:
    """Check that drawn tokens are among the likeliest, by transformers."""
    facts = [ranks_and_mass(model, r, a) for r, a in zip(requests, answers, strict=True)]
    ranks, mass, share = (np.concatenate(column) for column in zip(*facts, strict=True))
    assert mass.max() <= truncation.get("top_p", 1.0) + 1e-5
    assert ranks.max() < truncation.get("top_k", VOCAB)
    assert share.min() >= truncation.get("min_p", 0.0) - 1e-5


def test_stop_texts_end_a_response_that_keeps_them(truncating: EngineHost, model: Path) -> None:
    """Stop texts of one and two tokens stay in the response and its log-probs: the policy wrote them."""
    requests = driving.requests(64, seed=22, max_tokens=120)
    answers = truncating.call(driving.generate, requests)
    texts = decoder(transformers.AutoTokenizer.from_pretrained(model), (1, 2))([a.tokens for a in answers])
    ended = [
        text
        for a, text in zip(answers, texts, strict=True)
        if a.status is Status.FINISHED and a.tokens[-1] > 2
    ]
    assert {len(next(s for s in STOPS if text.endswith(s))) for text in ended} == {1, 2}
    for answer, text in zip(answers, texts, strict=True):
        assert len(answer.logprobs) == len(answer.tokens)
        before = text[:-1] if answer.status is Status.FINISHED and answer.tokens[-1] != 1 else text
        assert not any(stop in before for stop in STOPS)
    assert driving.worst_gap(model, requests[:8], answers[:8]) < 1e-4
    free = truncating.call(driving.generate, driving.requests(4, seed=22, max_tokens=120, ignore_stop=True))
    assert {a.status for a in free} == {Status.TRUNCATED}


def test_a_stop_token_of_the_configuration_ends_a_response_that_keeps_it(truncating: EngineHost) -> None:
    answers = truncating.call(driving.generate, driving.requests(64, seed=24, max_tokens=120))
    ended = [a for a in answers if 2 in a.tokens]
    assert ended and all(
        a.status is Status.FINISHED and a.tokens.tolist().index(2) == len(a.tokens) - 1 for a in ended
    )


def test_a_stop_text_that_begins_before_a_pause_ends_the_response(
    truncating: EngineHost, model: Path
) -> None:
    """Paused after every token: each stop text of two tokens spans a pause."""
    requests = driving.requests(48, seed=22, max_tokens=40)
    answers = truncating.call(driving.in_segments, requests, 1)
    texts = decoder(transformers.AutoTokenizer.from_pretrained(model), (1, 2))([a.tokens for a in answers])
    ended = {stop for stop in STOPS for text in texts if text.endswith(stop)}
    assert {len(stop) for stop in ended} == {1, 2}
    assert not any(stop in text[:-1] for text in texts for stop in STOPS)
    assert all(len(a.segments) == len(a.tokens) for a in answers)


LEADS = [chr(byte) for byte in range(0xC2, 0xD2)]
"""First bytes of two-byte characters, as letters of a byte-level vocabulary."""
TWO_BYTES = tuple(chr(code) for code in range(0xC0, 0x180))
"""Characters of the bytes 0xC3 to 0xC5 and one more."""


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model whose tokens are bytes: 1 in 8 begins a character, 1 in 2 can end it."""
    folder = write_model(tmp_path_factory.mktemp("bytes"), **ENGINE_SHAPE)
    byte_level(VOCAB).save_pretrained(folder)
    return folder


def byte_level(size: int = 259) -> transformers.PreTrainedTokenizerFast:
    """Build a tokenizer of padding, end and all bytes, those of two-byte characters first."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    spelled.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    characters = {spelled.id_to_token(i) for c in TWO_BYTES for i in spelled.encode(c).ids} | set(LEADS)
    words = ["<pad>", "</s>", *sorted(characters), *(c for c in letters if c not in characters)][:size]
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    made.pre_tokenizer, made.decoder = spelled.pre_tokenizer, decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_the_text_of_a_response_that_continues_is_that_of_one_request(kind: str) -> None:
    """Cut at every token, even within a character; vLLM decodes both kinds of tokenizer differently."""
    tokenizer: Any = byte_level() if kind == "fast" else transformers.ByT5Tokenizer()
    assert uses_fast_detokenizer(tokenizer) == (kind == "fast")
    prompt, response = (
        np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        for text in ("to 2 語 and ", "x √, 2 語")
    )
    for cut in range(len(response)):
        request = GenerationRequest("1.0", prompt, 1, 99, own_tokens=response[:cut])
        parameters = vllm_convert.sampling_params(request, stop=(), texts=("2 語",))
        state = goes_on(tokenizer, request, parameters)
        vllm_convert.restore_detokenizer(state, tokenizer, parameters, request)
        stops = [state.detokenizer.update([token], False) for token in response[cut:].tolist()]
        assert stops == [None] * (len(response) - cut - 1) + ["2 語"]
        assert state.detokenizer.output_text == "x √, "
        assert state.detokenizer.num_output_tokens() == len(response) - cut


def goes_on(tokenizer: Any, request: GenerationRequest, parameters: Any) -> Any:
    """Return the state of vLLM's output processor for a new request."""
    core_request: Any = types.SimpleNamespace(
        request_id=request.request_id,
        prompt_token_ids=request.engine_prompt().tolist(),
        prompt_embeds=None,
        sampling_params=parameters,
    )
    return types.SimpleNamespace(detokenizer=IncrementalDetokenizer.from_new_request(tokenizer, core_request))


def test_a_stop_text_of_the_prompt_ends_no_response_that_is_paused_inside_a_character(of_bytes: Path) -> None:
    """Paused after every token, so between the bytes of each character."""
    host = EngineHost(
        rollout=RolloutSection(
            dtype="float32", enforce_eager=True, kv_cache_bytes=64 << 20, max_num_seqs=64, stop=TWO_BYTES
        ),
        model_path=str(of_bytes),
        max_length=160,
        seed=1,
        real_weights=True,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(of_bytes)
    prompt = np.array(tokenizer.encode("é"), np.int32)
    requests = [
        dataclasses.replace(r, prompt_tokens=np.concatenate([r.prompt_tokens, prompt]))
        for r in driving.requests(48, seed=23, max_tokens=24)
    ]
    try:
        answers = host.call(driving.in_segments, requests, 1)
    finally:
        host.close()
    texts = decoder(tokenizer)([a.tokens for a in answers])
    assert {a.status for a in answers} == {Status.FINISHED, Status.TRUNCATED}
    assert any(0x180 <= ord(c) < 0x480 for text in texts for c in text), "a character that is no stop text"
    for answer, text in zip(answers, texts, strict=True):
        stops = [stop for stop in TWO_BYTES if stop in text]
        assert (answer.status is Status.FINISHED) == bool(stops)
        assert all(text.endswith(stop) for stop in stops)

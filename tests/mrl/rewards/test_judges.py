"""Model judges against a real server process: an outage never becomes a reward."""

import asyncio
import datetime
import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tokenizers.processors import TemplateProcessing

from mrl.data.conversation import Encoder
from mrl.errors import ConfigError, DataError, RewardError
from mrl.rewards.contract import RewardRequest, request_for
from mrl.rewards.judges import judge_cache, reward_model_judge
from mrl.rewards.judges.judge_cache import FILE
from mrl.rewards.judges.question import read_choice, read_line
from mrl.rewards.judges.reward_model_judge import ConversationEncoder
from mrl.rewards.kinds.ground_truth import parse_ground_truth
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.reward_part import ServerSection
from mrl.samples import Verdict, VerdictKind
from tests.support import chat_tokenizers
from tests.support.judge_server import FAILURES, judge_server

Asked = tuple[str, Callable[[], dict[str, int]], Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Asked]:
    with judge_server() as running:
        yield running


def section(url: str, *, retries: int = 0, deadline: float = 60.0, **rules: Any) -> RewardSection:
    llm = {k: v for k, v in rules.items() if k not in ServerSection.model_fields}
    server = {"tries": 1} | {k: v for k, v in rules.items() if k in ServerSection.model_fields}
    return RewardSection(
        kind="llm", path=url, llm=llm, server=server, retries=retries, deadline_seconds=deadline
    )


def test_a_judge_is_asked_about_what_is_left_of_a_response(server, make_pair, score_all) -> None:
    url, stats, _ = server
    before = stats()["calls"]
    responses = {
        "The sum is 12.": (VerdictKind.SCORED, 1.0),
        "The sum is 13.": (VerdictKind.SCORED, 0.0),
        "<think>12</think> I say 13": (VerdictKind.SCORED, 0.0),
        "": (VerdictKind.REJECTED, 0.0),
        " : ": (VerdictKind.REJECTED, 0.0),
        "question\nquestion": (VerdictKind.REJECTED, 0.0),
    }
    pairs = [make_pair(n, text, "12") for n, text in enumerate(responses)]
    with RewardPool(section(url)) as pool:
        verdicts = score_all(pool, pairs)
    assert [(v.kind, v.value) for _, v in sorted(verdicts.items())] == list(responses.values())
    assert stats()["calls"] == before + 3, "what says nothing is refused without asking"
    with RewardPool(section(url, verdict="choice")) as pool:
        values = score_all(pool, pairs[:2])
    assert values["0.0"].value == pytest.approx(0.9 / 0.99)
    assert values["1.0"].value == pytest.approx(0.09 / 0.99)


def test_of_calls_that_fail_none_is_scored(server: Asked, make_pair: Any, score_all: Any) -> None:
    """Only a server that never replies takes the whole deadline."""
    url, _, _ = server
    pairs = [(FAILURES[n % 10], make_pair(n, f"12 mode={FAILURES[n % 10]}", "12")) for n in range(100)]
    with RewardPool(section(url)) as pool, RewardPool(section(url, deadline=1.0)) as impatient:
        verdicts = score_all(pool, [pair for mode, pair in pairs if mode != "silent"])
        verdicts |= score_all(impatient, [pair for mode, pair in pairs if mode == "silent"])
        reasons = "".join(v.reason for v in verdicts.values())
    assert {v.kind for v in verdicts.values()} == {VerdictKind.NO_REWARD}
    for words in (
        "status 429",
        "status 503",
        "not valid JSON",
        "no reply",
        "is not a verdict",
        "ended by 'length'",
        "4194304",
    ):
        assert words in reasons


def test_a_busy_server_is_asked_again_and_a_dead_one_never_scores(make_pair: Any, score_all: Any) -> None:
    with judge_server() as (url, stats, process), RewardPool(section(url, tries=3)) as pool:
        verdicts = score_all(pool, [make_pair(0, "12 mode=busy", "12")])
        assert "(3 tries)" in verdicts["0.0"].reason and stats()["calls"] == 3
        assert score_all(pool, [make_pair(1, "12", "12")])["1.0"].value == 1.0
        verdicts = score_all(pool, [make_pair(50, "12 mode=later", "12")])
        assert "asks for a pause of 3600 s" in verdicts["50.0"].reason and stats()["calls"] == 5
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        verdicts = score_all(pool, [make_pair(n, "12", "12") for n in range(2, 40)])
    assert {v.kind for v in verdicts.values()} == {VerdictKind.NO_REWARD}
    assert "ConnectError" in verdicts["2.0"].reason


def test_a_call_that_is_wrong_is_made_once(make_pair: Any, score_all: Any) -> None:
    with judge_server() as (url, stats, _), RewardPool(section(url, tries=3, retries=2)) as pool:
        verdict = score_all(pool, [make_pair(0, "12 mode=too much", "12")])["0.0"]
        assert (
            verdict.kind is VerdictKind.NO_REWARD and 'status 400: b\'{"error": "the prompt' in verdict.reason
        )
        assert stats()["calls"] == 1
        verdict = score_all(pool, [make_pair(1, "12 mode=no reply", "12")])["1.0"]
        assert verdict.kind is VerdictKind.NO_REWARD and stats()["calls"] == 7, "two replies an attempt"


def test_a_resumed_run_asks_nothing_twice_and_keeps_its_budget(
    server: Asked, make_pair: Any, score_all: Any, tmp_path: Path
) -> None:
    url, stats, _ = server
    folder = str(tmp_path / "judged")
    before = stats()["calls"]
    pairs = [make_pair(n, str(n), "12") for n in range(10, 14)]
    first = RewardPool(section(url), folder=folder)
    with first:
        values = {name: v.value for name, v in score_all(first, pairs).items()}
    file = tmp_path / "judged" / FILE
    file.write_bytes(file.read_bytes() + b'{"judge": "ab')  # killed while it wrote
    limited = section(url, max_calls=5, retries=3)
    with RewardPool(limited, folder=folder) as pool:
        again = {name: v.value for name, v in score_all(pool, pairs).items()}
        new = score_all(pool, [make_pair(20, "1", "12")])
        last = score_all(pool, [make_pair(21, "2", "12")])
    assert again == values and stats()["calls"] == before + 5
    assert new["20.0"].value == 0.0
    assert last["21.0"].value is None and "budget is spent: max_calls = 5" in last["21.0"].reason
    assert "failed once" in last["21.0"].reason, "another attempt would find no more of it"


def test_replies_that_only_look_like_verdicts_are_none() -> None:
    choices, nonce = {"no": 0.0, "yes": 1.0}, "00ff00ff00ff00ff"
    right = f"VERDICT {nonce}: yes"

    def read(text: Any, ended: str = "stop") -> float:
        return read_line({"message": {"content": text}, "finish_reason": ended}, choices, nonce)

    assert read(f"Thoughts.\n\n{right}\n ") == 1.0
    assert read(f"{right}\nno, rather:\nverdict {nonce}: NO") == 0.0
    texts = ["", None, 7, "yes", "Incorrect. The eyes", "VERDICT: yes", "\\boxed{yes}", '{"verdict": "yes"}']
    texts += [
        f"{right}\nThank you.", f"{right}.", f"{right} or no", f"**{right}**", right.replace("0", "1"),
        f"> {right}",
    ]  # fmt: skip
    for text in texts:
        with pytest.raises(RewardError, match="not a verdict"):
            read(text)
    with pytest.raises(RewardError, match="ended by 'length'"):
        read(right, "length")
    for top in (
        [],
        [{"token": "the", "logprob": -0.1}],
        [{"token": "yes", "logprob": float("nan")}],
        "yes",
        None,
    ):
        with pytest.raises(RewardError):
            read_choice({"logprobs": {"content": [{"top_logprobs": top}]}}, choices)


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        ({"choices": {"yes": 1.0, "Yes ": 0.0}}, "differ in more than capitals"),
        ({"choices": {"yes": 1.0, "no": 1.0}}, "have the same value"),
        ({"constrained": True}, "constrained is for verdict = choice"),
    ],
)
def test_settings_that_decide_nothing_are_refused(rules: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        section("http://127.0.0.1:9", **rules)


def test_the_page_s_example_is_a_configuration() -> None:
    page = (Path(__file__).parents[3] / "docs/rewards.md").read_text()
    example = re.search(r"^```yaml\n(reward:.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert example is not None
    chat = RewardSection(**yaml.safe_load(example[1])["reward"]).for_domain("chat")
    assert [part.label for part in chat.verifiers()] == ["format", "helpful", "reward_model"]


def test_what_a_judge_cannot_be_shown_is_named(tmp_path: Path, make_pair: Any, score_all: Any) -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(DataError, match="f:1: a judge's reference must be text or a number, not list"):
        parse_ground_truth(["12"], domain="x", section=section(url), place="f:1")
    assert parse_ground_truth(None, domain="x", section=section(url, reference=False), place="f:1") is None
    template = tmp_path / "template.txt"
    template.write_text("{prompt} {reference}")
    faults = {
        "has the placeholders ['prompt', 'reference']": section(url, template=str(template)),
        "set this environment variable": section(url, api_key_env="MRL_NO_SUCH_KEY"),
    }
    for words, broken in faults.items():
        with RewardPool(broken) as pool:
            assert words in score_all(pool, [make_pair(0, "12", "12")])["0.0"].reason


def test_a_folder_whose_padding_is_its_end_is_no_reward_model(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3ForSequenceClassification"], "pad_token_id": 2, "eos_token_id": 2}
    for change, error in (
        ({}, "two different tokens"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "not a ...For"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=error):
            ConversationEncoder(str(tmp_path))


def save_classifier(folder: Path, tokenizer: Any, **fields: Any) -> int:
    """Write the parts of a classifier's folder that conversations need; return its end token."""
    tokenizer.save_pretrained(folder)
    end = int(tokenizer.eos_token_id)
    config = {
        "architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3", "num_labels": 1,
        "pad_token_id": end + 1, "eos_token_id": end,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | fields))
    return end


def scored_here(section: RewardSection, pair: Any, folder: str | None = None) -> Verdict:
    """Score with the section's only verifier in this process; let its exceptions pass."""
    (part,), (sample, prompt) = section.all_verifiers(), pair
    kind = reward_kind(part, folder)
    request = request_for(sample, prompt, ground_truth=prompt.ground_truth, deadline_seconds=60.0)
    return asyncio.run(kind.verifier(kind.stages[0]).score(request))


def asking(url: str, server: dict[str, Any]) -> RewardSection:
    named = {"kind": "reward_model", "path": url, "server": server}
    return RewardSection.model_validate(named | {"retries": 0, "deadline_seconds": 60.0})


def scored_by_heads(folder: Path, url: str, heads: int, *, served: int) -> RewardSection:
    """Return a reward model with `heads` in its folder, at a server that returns `served` numbers."""
    tokenizer = chat_tokenizers.qwen()
    labels = {str(head): f"head {head}" for head in range(heads)}
    save_classifier(folder, tokenizer, id2label=labels, num_labels=None)
    server = {"tokenizer": str(folder), "tries": 1, "model": str(served)}
    return asking(url, server)


def test_a_template_writes_the_day_of_the_runs_first_start(
    server: Asked, make_pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After midnight, cached verdicts stay valid and new requests still have the first day's tokens."""
    url, stats, _ = server
    save_classifier(
        tmp_path,
        chat_tokenizers.qwen("{{ strftime_now('%Y-%m-%d') }}\n" + chat_tokenizers.CHATML),
        num_labels=1,
    )
    rewards = asking(url, {"tokenizer": str(tmp_path), "tries": 1})
    pairs, first = (
        [make_pair(n, response, None) for n, response in ((0, "12"), (1, "13"))],
        datetime.date(2020, 1, 1),
    )

    def scored_on(day: datetime.date, pair: Any) -> Verdict:
        fixed = type("Day", (datetime.date,), {"today": classmethod(lambda _: day)})
        for module in (judge_cache, reward_model_judge):
            monkeypatch.setattr(module, "datetime", SimpleNamespace(date=fixed))
        return scored_here(rewards, pair, str(tmp_path / "judged"))

    before = stats()["calls"]
    one = scored_on(first, pairs[0])
    assert (
        scored_on(datetime.date(2020, 1, 2), pairs[0]).value == one.value and stats()["calls"] == before + 1
    )
    other = scored_on(datetime.date(2020, 1, 2), pairs[1])
    request = RewardRequest("1.0", 1, "13", None, prompt=pairs[1][1].text)
    assert other.value == sum(ConversationEncoder(str(tmp_path), date=first).ids(request)[0]), other.reason


@pytest.mark.parametrize(("labels", "message"), [(3, "gives 3 numbers"), (0, "gives 2 numbers")])
def test_several_numbers_are_no_reward(
    labels: int, message: str, server: Asked, make_pair: Any, tmp_path: Path
) -> None:
    """Without label names transformers assumes two labels."""
    section = scored_by_heads(tmp_path, server[0], labels, served=labels)
    with pytest.raises(ConfigError, match=message):
        scored_here(section, make_pair(0, "12", None))


def test_a_process_reward_model_of_an_earlier_release_is_no_reward(tmp_path: Path) -> None:
    save_classifier(tmp_path, chat_tokenizers.qwen(), id2label={"0": "step_score"})
    with pytest.raises(ConfigError, match="scores the steps of a response"):
        ConversationEncoder(str(tmp_path))


def test_an_answer_of_several_numbers_is_no_reward(server: Asked, make_pair: Any, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="is not one number"):
        scored_here(scored_by_heads(tmp_path, server[0], 1, served=2), make_pair(0, "12", None))


SCHOOLS = sorted(set(chat_tokenizers.ALL) - {"llama"})
"""Templates for which the tokens of a conversation's beginning are a prefix of its tokens."""


@pytest.mark.parametrize("school", [*SCHOOLS, "opening without a template"])
def test_a_reward_model_is_given_the_tokens_that_it_was_trained_on(school: str, tmp_path: Path) -> None:
    """The tokens end with the scored end token, whatever the template appends, and keep the opening one."""
    tokenizer = chat_tokenizers.qwen() if school.startswith("opening") else chat_tokenizers.ALL[school]()
    if school.startswith("opening"):
        start = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{start[0]} $A", special_tokens=[start]
        )
        tokenizer.chat_template = None
    end = save_classifier(tmp_path, tokenizer)
    elsewhere = ConversationEncoder(str(tmp_path))
    (tmp_path / "reward_model.json").write_text(json.dumps({"end_tokens": [end]}))
    ours = ConversationEncoder(str(tmp_path))
    messages = ({"role": "user", "content": "What is 3 times 4?"}, {"role": "assistant", "content": "12"})
    encoder = Encoder(tokenizer, ends=[end])
    if tokenizer.chat_template:
        trained = encoder.messages(messages, first=1, place="row")
    else:
        trained = encoder.text(messages[0]["content"], messages[1]["content"], place="row")
    request = RewardRequest("0.0", 0, "12", "12", prompt=messages[0]["content"], messages=messages[:1])
    assert ours.ids(request)[0] == trained.tokens.tolist()
    longer = elsewhere.ids(request)[0]  # one from elsewhere may have its score at the template's last token
    assert (longer != trained.tokens.tolist()) == (school == "qwen")
    assert (ours.version != elsewhere.version) and longer[: len(trained.tokens)] == trained.tokens.tolist()

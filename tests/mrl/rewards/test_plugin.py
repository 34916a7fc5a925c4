"""Plug-in styles: one contract suite for all, signatures, and missing names."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.errors import ConfigError, RewardError
from mrl.rewards.contract import GroupVerifier, RewardRequest, Verifier
from mrl.rewards.kinds.reward_section import KindPart, RewardSection
from mrl.rewards.plugins.plugin_verifier import load_plugin
from mrl.rewards.pool.reward_pool import RewardPool, try_verifiers
from mrl.samples import VerdictKind
from mrl.user_code import place_of
from tests.support.plugin_rewards import PLUGINS

STYLES = {
    "native": {"path": "native"},
    "native async": {"path": "native_async"},
    "verl": {"path": "verl", "style": "verl"},
    "trl": {"path": "trl", "style": "trl"},
    "openrlhf": {"path": "openrlhf", "style": "openrlhf"},
}


def part(path: str, **fields: Any) -> KindPart:
    return KindPart(kind="plugin", path=f"{PLUGINS}:{path}", **fields)


def request(response: str, ground_truth: Any = "7", **fields: Any) -> RewardRequest:
    metadata = {"ground_truth": ground_truth, "data_source": "tests", "extra_info": {"index": 3}}
    defaults = {
        "prompt": "What is 3 + 4?",
        "metadata": metadata,
        "response_tokens": np.arange(4, dtype=np.int32),
    }
    return RewardRequest(
        sample_id="1.0", group_id=1, response=response, ground_truth=ground_truth, **{**defaults, **fields}
    )


def score(verifier: Verifier | GroupVerifier, request: RewardRequest) -> Any:
    assert isinstance(verifier, Verifier)
    return asyncio.run(verifier.score(request))


@pytest.mark.parametrize("style", STYLES)
def test_every_style_gives_the_value_of_the_native_function(style: str) -> None:
    verifier = load_plugin(part(**STYLES[style]))
    native = load_plugin(part("native"))
    for response in ("it is 7", "it is 8", "", "7" * 1000):
        mine, theirs = score(verifier, request(response)), score(native, request(response))
        assert (mine.kind, mine.value) == (theirs.kind, theirs.value)
    assert len(verifier.version) == 12, "the source's hash names the version"


@pytest.mark.parametrize("style", ["trl", "openrlhf"])
def test_batch_styles_score_whole_groups(style: str) -> None:
    verifier = load_plugin(part(style, style=style, group=True))
    assert isinstance(verifier, GroupVerifier)
    verdicts = asyncio.run(verifier.score_group([request("7"), request("8"), request("77")]))
    assert [v.value for v in verdicts if v] == [1.0, 0.0, 1.0]


def test_messages_are_handed_over_as_messages() -> None:
    seen: dict[str, Any] = {}
    from mrl.rewards.plugins import plugin_verifier

    def function(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, columns=columns)
        return [1.0]

    conversation = request("7", messages=({"role": "user", "content": "3+4"},))
    verifier = plugin_verifier.SinglePlugin(function, part("trl", style="trl"), "trl", "1")
    assert score(verifier, conversation).value == 1.0
    assert seen["prompts"] == [[{"role": "user", "content": "3+4"}]]
    assert seen["completions"] == [[{"role": "assistant", "content": "7"}]]
    assert seen["ids"] == [[0, 1, 2, 3]]
    assert seen["columns"]["ground_truth"] == ["7"]


@pytest.mark.parametrize("style", STYLES)
def test_the_style_is_seen_by_the_arguments(style: str) -> None:
    fields = {name: value for name, value in STYLES[style].items() if name != "style"}
    named, seen = load_plugin(part(**STYLES[style])), load_plugin(part(**fields))
    assert seen.name == named.name
    for response in ("it is 7", "it is 8"):
        assert score(seen, request(response)).value == score(named, request(response)).value


def functions_of_the_page() -> list[str]:
    page = (Path(__file__).parents[3] / "docs/rewards.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(4))
def test_the_functions_that_the_page_begins_with_give_rewards(number: int, tmp_path: Path) -> None:
    text = functions_of_the_page()[number]
    name = text.partition("(")[0].removeprefix("def ")
    (tmp_path / "rewards.py").write_text(text)
    verifier = load_plugin(KindPart(kind="plugin", path=f"{tmp_path}/rewards.py:{name}"))
    assert verifier.name.partition(":")[0] == ("native", "trl", "verl", "openrlhf")[number]
    assert [score(verifier, request(f"So.\nAnswer: {n}")).value for n in (7, 8)] == [1.0, 0.0]
    assert score(verifier, request("Answer: 7", messages=({"role": "user", "content": "3+4"},))).value == 1.0


FUNCTIONS = """
import json, statistics
def no_return(completions, **columns):
    [1.0 for _ in completions]
def nones(completions, **columns):
    return [None for _ in completions]
def generic(**columns):
    return [1.0]
def raises_in_a_library(request):
    return json.loads(request.response)["score"]
def wrapped(request):
    try:
        return raises_in_a_library(request)
    finally:
        statistics.mean([1])
def none(request):
    return None if request else 1.0
"""


def test_a_function_of_no_style_is_told_that_there_are_styles(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    with pytest.raises(
        ConfigError, match=r"reward.style names another convention: native, verl, trl, openrlhf"
    ):
        load_plugin(KindPart(kind="plugin", path=f"{tmp_path}/own.py:generic"))


@pytest.mark.parametrize(("name", "line"), [("raises_in_a_library", 10), ("wrapped", 10)])
def test_what_a_function_raises_is_placed_in_the_user_s_file(name: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    verifier = load_plugin(KindPart(kind="plugin", path=f"{tmp_path}/own.py:{name}"))
    with pytest.raises(json.JSONDecodeError) as error:
        score(verifier, request("no JSON"))
    assert place_of(error.value) == f" at {tmp_path}/own.py:{line}"
    assert "json/decoder.py" in str(error.traceback[-1].path), "where it was raised"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises_in_a_library",
         r"whose response is '0': .*own.py:10; catch it in the function and return a number"),
        ("no_return", "returned None, not a list with a number for each of 1 responses"),
        ("nones", "returned None for all 4 trial responses.*return a number"),
        ("none", "returned None for all 4 trial responses.*return a number"),
    ],
)  # fmt: skip
def test_a_reward_that_gives_none_is_refused_before_a_run(name, says, tmp_path, make_pair) -> None:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    reward = RewardSection(kind="plugin", path=f"{tmp_path}/own.py:{name}", workers=1)
    prompts = [make_pair(n, "", truth)[1] for n, truth in enumerate(("1", "2"))]
    with pytest.raises(RewardError, match=says) as error:
        try_verifiers(reward, prompts)
    assert len(str(error.value).splitlines()) == 1


def test_a_cause_that_many_samples_share_is_logged_once_with_its_count(
    tmp_path: Path, make_pair: Any, score_all: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(FUNCTIONS)
    reward = RewardSection(kind="plugin", path=f"{tmp_path}/own.py:raises_in_a_library", workers=1, retries=0)
    with RewardPool(reward) as pool:
        verdicts = score_all(pool, [make_pair(n, f"no JSON {'x' * n}", "1") for n in range(45)])
    assert {verdict.kind for verdict in verdicts.values()} == {VerdictKind.NO_REWARD}
    lines = [r.getMessage() for r in caplog.records if "no reward" in r.getMessage()]
    assert len(lines) == 2 and "(10 of this cause)" in lines[1]
    assert all(f"{tmp_path}/own.py:10" in line for line in lines)


def test_verl_parts_and_arguments_arrive() -> None:
    verdict = score(load_plugin(part("verl", style="verl")), request("it is 7"))
    assert verdict.parts == {"length": 7.0}


def test_none_means_that_the_verifier_does_not_apply() -> None:
    assert score(load_plugin(part("trl", style="trl")), request("x", ground_truth="skip")) is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"path": f"{PLUGINS}:natve"}, "no function 'natve'"),
        ({"path": "mrl.no_such_module:f"}, "cannot be imported"),
        ({"path": "/no/such/file.py:f"}, "no file"),
        ({"path": f"{PLUGINS}:wrong_signature", "style": "verl"}, "signature"),
        ({"path": f"{PLUGINS}:native", "style": "trl"}, "signature"),
        ({"path": f"{PLUGINS}:verl", "style": "native"}, "signature"),
        ({"path": f"{PLUGINS}:verl", "style": "openrlhf"}, "signature"),
    ],
)
def test_what_cannot_be_called_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_plugin(KindPart(kind="plugin", **fields))


@pytest.mark.parametrize("fields", [{"path": None}, {"path": "module.function"}])
def test_a_path_without_a_function_is_refused_by_the_configuration(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="path"):
        KindPart(kind="plugin", **fields)

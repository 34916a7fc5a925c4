"""Plug-in styles: one contract suite for all of them, signatures, and names that do not exist."""

import asyncio
from typing import Any

import numpy as np
import pytest

from mrl.errors import ConfigError, RewardError
from mrl.rewards.contract import GroupVerifier, Request, Verifier
from mrl.rewards.kinds.section import KindPart
from mrl.rewards.plugins.plugin import load_plugin
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


def request(response: str, ground_truth: Any = "7", **fields: Any) -> Request:
    metadata = {"ground_truth": ground_truth, "data_source": "tests", "extra_info": {"index": 3}}
    defaults = {
        "prompt": "What is 3 + 4?",
        "metadata": metadata,
        "response_tokens": np.arange(4, dtype=np.int32),
    }
    return Request(
        sample_id="1.0", group_id=1, response=response, ground_truth=ground_truth, **{**defaults, **fields}
    )


def score(verifier: Verifier | GroupVerifier, asked: Request) -> Any:
    assert isinstance(verifier, Verifier)
    return asyncio.run(verifier.score(asked))


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
    from mrl.rewards.plugins import plugin

    def function(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, columns=columns)
        return [1.0]

    asked = request("7", messages=({"role": "user", "content": "3+4"},))
    verifier = plugin.SinglePlugin(function, part("trl", style="trl"), "trl", "1")
    assert score(verifier, asked).value == 1.0
    assert seen["prompts"] == [[{"role": "user", "content": "3+4"}]]
    assert seen["completions"] == [[{"role": "assistant", "content": "7"}]]
    assert seen["ids"] == [[0, 1, 2, 3]]
    assert seen["columns"]["ground_truth"] == ["7"]


def test_verl_parts_and_arguments_arrive() -> None:
    verdict = score(load_plugin(part("verl", style="verl")), request("it is 7"))
    assert verdict.parts == {"length": 7.0}


def test_none_means_that_the_verifier_does_not_apply() -> None:
    assert score(load_plugin(part("trl", style="trl")), request("x", ground_truth="skip")) is None


@pytest.mark.parametrize(
    ("name", "says"), [("gives_nan", "nan"), ("gives_infinity", "inf"), ("gives_text", "not str")]
)
def test_values_that_are_no_rewards_are_errors(name: str, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        score(load_plugin(part(name)), request("x"))


def test_value_range_is_kept() -> None:
    with pytest.raises(RewardError, match="value_range"):
        score(load_plugin(part("above_range", value_range=(0.0, 1.0))), request("x"))
    assert score(load_plugin(part("above_range")), request("x")).value == 3.0


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

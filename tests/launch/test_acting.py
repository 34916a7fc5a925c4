"""Environment and chat template are checked before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.config.root import Config
from mrl.data.load_rows import load_data
from mrl.errors import ConfigError
from mrl.launch.workers.environments import check_environments, require_known_domains
from mrl.launch.workers.rollout_workers import descriptions, require_described
from tests.support import chat_tokenizers

ROOT = Path(__file__).parents[2]


def acting(environment: str, *words: str) -> Config:
    agent = f"agent={{environment: '{environment}', max_turns: 3}}"
    return load([ROOT / "configs/quickstart.yaml"], ["model.max_length=64", agent, *words])


def test_what_an_environment_says_of_itself() -> None:
    environments = check_environments(acting("calculator"), chat_tokenizers.qwen())
    assert environments is not None
    rules, tools = environments.rules_of("any"), environments.tools_of("any")
    assert isinstance(tools, list) and [tool["function"]["name"] for tool in tools] == ["calculator"]
    assert rules is not None and set(rules.tools) == {"calculator"} and rules.replayable
    assert (rules.limits.max_context, rules.limits.max_tokens) == (64, 6)
    assert check_environments(load([ROOT / "configs/quickstart.yaml"]), None) is None


def test_an_environment_that_is_another_one_on_a_workers_node_is_refused() -> None:
    environments = check_environments(acting("calculator"), chat_tokenizers.qwen())
    described = descriptions(environments)
    require_described(environments, described)
    with pytest.raises(ConfigError, match="'calculator' differs from the one on the driver's node"):
        require_described(environments, {key: ({}, flag) for key, (_, flag) in described.items()})


SMOLLM = chat_tokenizers.CHATML.replace("{%- if tools %}", "{%- if false %}")
"""A template that ignores tools, as SmolLM2's does."""


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"does not show the tools of 'calculator' \(calculator\).*show_tools=system"
    ):
        check_environments(acting("calculator"), chat_tokenizers.qwen(SMOLLM))
    assert check_environments(acting("tests.support.guess:Guess"), chat_tokenizers.qwen(SMOLLM)) is not None


@pytest.mark.parametrize("form", ["hermes", "json"])
def test_tools_in_the_system_message(form: str, tmp_path: Path) -> None:
    """Check prompts of rows with and without a system message, and the opening of an episode."""
    rows = [
        [{"role": "user", "content": "6*7?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}],
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": row, "answer": "42"}) + "\n" for row in rows))
    words = (
        "agent.show_tools=system", f"agent.tool_calls={form}", f"data.train={path}", "data.validation=null",
        "data.max_prompt_tokens=4000",
    )  # fmt: skip
    config, tokenizer = acting("calculator", *words), chat_tokenizers.qwen(SMOLLM)
    environments = check_environments(config, tokenizer)
    assert environments is not None and environments.rules_of("default") is not None
    data = load_data(config.data, config.reward, tokenizer, tools=environments.tools_of)
    texts = [prompt.text for prompt in data.train[0].rows]
    rules = environments.rules_of("default")
    assert rules is not None
    texts.append(tokenizer.decode(rules.renderer.opening(rows[0])))
    marks = "<tool_call>" if form == "hermes" else "a list of such objects"
    for text in texts:
        head, _, conversation = text.partition("<|im_end|>")
        assert head.startswith("<|im_start|>system") and '"name": "calculator"' in head and marks in head
        assert "6*7?" in conversation and "calculator" not in conversation
    assert "Be brief.\n\nYou can call" in texts[1]


def test_tools_that_prompts_describe_are_not_added() -> None:
    environments = check_environments(acting("calculator", "agent.show_tools=none"), chat_tokenizers.qwen())
    assert environments is not None and environments.tools_of("any") == ""
    rules = environments.rules_of("any")
    assert rules is not None and set(rules.tools) == {"calculator"}
    opening = chat_tokenizers.qwen().decode(rules.renderer.opening([{"role": "user", "content": "6*7?"}]))
    assert "calculator" not in opening


def test_a_template_that_rewrites_history_and_an_environment_that_is_none() -> None:
    forgetful = chat_tokenizers.qwen(chat_tokenizers.FORGETFUL)
    with pytest.raises(
        ConfigError, match=r"rewrites a turn before observations of the role 'user': after .*mrlthought"
    ):
        check_environments(acting("tests.support.guess:Guess"), forgetful)
    with pytest.raises(ConfigError, match=r"agent.environment = 'guest'"):
        check_environments(acting("guest"), forgetful)


DOMAINS = (
    "agent.domains={riddles: {environment: tests.support.guess:Guess, options: {highest: 9}}, prose: {}}"
)


def test_each_domain_has_its_environment_and_its_tools() -> None:
    environments = check_environments(acting("calculator", DOMAINS), chat_tokenizers.qwen())
    assert environments is not None
    rules = {domain: environments.rules_of(domain) for domain in ("sums", "riddles", "prose")}
    assert rules["sums"] is not None and rules["sums"].environment == "calculator"
    assert (
        rules["riddles"] is not None
        and rules["riddles"].environment == "tests.support.guess:Guess of riddles"
    )
    assert set(rules["sums"].tools) == {"calculator"} and not rules["riddles"].tools
    assert rules["prose"] is None and environments.tools_of("prose") is None
    assert environments.tools_of("riddles") == [] and environments.tools_of("sums")


def test_domains_that_no_row_has_and_rewards_that_nobody_gives() -> None:
    config = acting("calculator", DOMAINS, "reward={kind: environment}")
    environments = check_environments(config, chat_tokenizers.qwen())
    assert environments is not None
    with pytest.raises(
        ConfigError, match=r"agent.domains names prose, which have no rows; the rows have riddles, sums"
    ):
        require_known_domains(environments, config.reward, ["sums", "riddles"])
    with pytest.raises(ConfigError, match=r"domain 'prose' have no environment.*reward.domains"):
        require_known_domains(environments, config.reward, ["prose", "sums", "riddles"])
    judged = acting("calculator", DOMAINS, "reward={kind: environment, domains: {prose: {kind: maths}}}")
    require_known_domains(environments, judged.reward, ["prose", "sums", "riddles"])


def test_a_section_without_any_environment() -> None:
    with pytest.raises(ConfigError, match="names no environment"):
        load([ROOT / "configs/quickstart.yaml"], ["agent={domains: {prose: {}}}"])

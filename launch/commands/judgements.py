"""`mrl make judgements`: demonstrations of a verdict, which a language model that judges (reward kind `llm`) is tuned on.

A demonstration is the question that the judge of a configuration would be asked in a run, fences, nonce and form of the verdict
included, about the better or the worse response of a pair (launch/commands/preferences.py), and the verdict that is due: the choice
with the highest value or that with the lowest. Generative verifiers: arXiv 2408.15240.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.data.load_rows import load_data
from mrl.data.tokenise import tokenizer_of
from mrl.errors import ConfigError
from mrl.launch.commands.preferences import Pair, PreferenceOptions, pairs_of, told_ways
from mrl.prepare.arithmetic_rows import write_rows
from mrl.rewards.contract import RewardRequest
from mrl.rewards.judges.judge_rules import LlmRules
from mrl.rewards.judges.llm import Questions
from mrl.rewards.judges.question import thought_of
from mrl.rewards.kinds.ground_truth import ground_truth_of
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.reward_part import ServerSection

FILES = {"train": "judgements.jsonl", "validation": "judgements_validation.jsonl"}
GOLD = "gold.jsonl"
"""The responses of the validation's pairs as `mrl rewards check --gold` reads them."""


def make_judgements(
    config: Config, judge: Config, options: PreferenceOptions, thought: str | Path | None = None
) -> str:
    """Writes demonstrations of data.train and of data.validation, by the rewards of `config` and for the judge of `judge`; what was made,
    in sentences. `thought`: a file that says what stands before each verdict (mrl/rewards/judges/question.py).

    ConfigError where `judge` has not one verifier of kind llm; DataError where no row gives a pair.
    """
    rules, server = _rules(judge.reward)
    thinks = "" if thought is None else thought_of(thought, rules)
    pairs, truths = pairs_of(config, options), _ground_truths(judge, rules)
    questions, draw = Questions(rules, server), random.Random(config.run.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    said, choices = [], sorted(rules.choices, key=lambda choice: rules.choices[choice])
    for use, found in pairs.items():
        rows = [
            row for pair in found for row in _demonstrations(pair, choices, questions, thinks, truths, draw)
        ]
        if rows:
            write_rows(options.out / FILES[use], rows)
            said.append(f"{options.out / FILES[use]}: {len(rows)} verdicts on {told_ways(found)}")
    gold = [row for pair in pairs.get("validation", []) for row in _gold(pair, truths)]
    if gold:
        write_rows(options.out / GOLD, gold)
        said.append(f"{options.out / GOLD}: {len(gold)} responses")
    return "\n".join(said)


def _rules(section: RewardSection) -> tuple[LlmRules, ServerSection]:
    found = [part for part in section.all_verifiers() if part.kind == "llm"]
    if len(found) != 1:
        raise ConfigError(f"--judge has {len(found)} verifiers of kind llm; judgements are for one")
    return found[0].llm, found[0].server  # type: ignore[attr-defined] each kind's rules are in the part


def _ground_truths(judge: Config, rules: LlmRules) -> dict[str, str]:
    """A row's place -> what the judge is shown as its right answer."""
    tokenizer = tokenizer_of(judge.model)
    dataset, found = load_data(judge.data, judge.reward, tokenizer), {}
    for source in (*dataset.train, *dataset.validation):
        for prompt in source.rows:
            parts = judge.reward.for_domain(prompt.domain).verifiers()
            part = next((part for part in parts if part.kind == "llm"), None)
            if part is not None:
                truth = ground_truth_of(part, ground_truth=prompt.ground_truth, alone=len(parts) == 1)
                found[prompt.row] = str(truth) if rules.reference else ""
    return found


def _demonstrations(
    pair: Pair,
    choices: Sequence[str],
    questions: Questions,
    thinks: str,
    truths: dict[str, str],
    draw: random.Random,
) -> Iterator[dict[str, Any]]:
    """Two of a pair, `choices` from the worst to the best; none of what the judge would refuse unasked, or is not asked about."""
    truth, prompt = truths.get(pair.prompt.row), pair.prompt
    for response, choice in ((pair.better, choices[-1]), (pair.worse, choices[0])):
        request = RewardRequest("", 0, response, truth, prompt=prompt.text, messages=prompt.messages)
        nonce = f"{draw.getrandbits(64):016x}"
        if truth is not None and (told := questions.demonstration(request, choice, nonce, thinks)):
            asked, verdict = told
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": verdict}]
            yield {"messages": messages, "tag": pair.tag}


def _gold(pair: Pair, truths: dict[str, str]) -> Iterator[dict[str, Any]]:
    for response, right in ((pair.better, True), (pair.worse, False)):
        row = {"prompt": pair.asked, "response": response, "right": right, "tag": pair.tag}
        yield row | {"answer": truths.get(pair.prompt.row), "domain": pair.prompt.domain}

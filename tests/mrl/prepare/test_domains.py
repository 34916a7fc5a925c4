"""The tasks of the multi-domain recipe: right by their own verifiers, disjoint, and the recipe loads them."""

import json
import random
from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.data.load_rows import load_data
from mrl.prepare import domains, tokenizer
from mrl.rewards.code.code_verifier import verify_program as verify_code
from mrl.rewards.code.tasks import parse_task
from mrl.rewards.instructions.instruction_verifier import parse_checks, verify_instructions
from mrl.rewards.maths.maths_rules import MathsRules
from mrl.rewards.maths.maths_verifier import verify_exactly

ROOT = Path(__file__).parents[3]
NAMES = ("sums", "code", "style")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return domains.write_domains(tmp_path_factory.mktemp("work"))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_prompt_lies_in_two_files(folder: Path) -> None:
    prompts = [row["prompt"] for file in folder.iterdir() for row in rows(file)]
    assert len(set(prompts)) == len(prompts)
    assert min(len(rows(folder / f"{name}.jsonl")) for name in NAMES) >= 80


def test_demonstrations_are_right_and_others_wrong() -> None:
    code = domains._functions()[7]
    assert verify_code(code.response, parse_task(code.answer, place="x")).value == 1.0
    assert verify_code("def f(a,b):return a", parse_task(code.answer, place="x")).value == 0.0
    for task in domains._instructions(random.Random(0)):
        checks = parse_checks(task.answer, place="x")
        assert verify_instructions(task.response, checks).value == 1.0
        assert verify_instructions("seven words are more than wanted here", checks).value == 0.0
    sums = [verify_exactly(t.response, t.answer, MathsRules()) for t in domains._sums()[:50]]
    assert all(verdict is not None and verdict.value == 1.0 for verdict in sums)


def test_the_recipe_loads_them_in_exact_shares(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = (ROOT / "configs" / "multi_domain.yaml").read_text().replace("work/domains", str(folder))
    (tmp_path / "recipe.yaml").write_text(text)
    config = load([tmp_path / "recipe.yaml"])
    tokenizer.write_characters([folder / "sft.jsonl"], tmp_path / "tokenizer")
    data = load_data(config.data, config.reward, AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer")))
    taken = [prompt.domain for prompt in data.stream(0).take(200)]
    assert {name: taken.count(name) for name in NAMES} == {"sums": 80, "code": 60, "style": 60}
    assert data.report.overlapping == data.report.overlong == data.report.duplicates == 0
    unknown = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer")).unk_token_id
    assert not any(unknown in prompt.tokens for prompt in data.stream(0).take(200))
    assert {p.domain for p in data.validation_prompts(6)} == set(NAMES)

"""Loading: dropped rows are counted, ground truths checked, bad rows named by file and line."""

from typing import Any

import pytest

from mrl.config.sections.data import DataSection
from mrl.config.sections.loop import LoopSection
from mrl.data import load_rows
from mrl.data.load_rows import load_data, load_validation
from mrl.data.row_shapes import DataRow, read_row
from mrl.errors import DataError
from mrl.rewards.kinds.reward_section import RewardSection

MATHS = RewardSection(kind="maths")


def row(n: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"{n}+{n}=", "answer": 2 * n, **fields}


def test_the_simple_case(write_rows: Any, plain_tokenizer: Any) -> None:
    train = write_rows([row(n) for n in range(5)], "train.jsonl")
    validation = write_rows([row(n) for n in range(10, 13)], "validation.jsonl")
    data = load_data(DataSection(train=train, validation=validation), MATHS, plain_tokenizer)
    prompts = data.stream(seed=0).take(5)
    assert sorted(p.ground_truth for p in prompts) == ["0", "2", "4", "6", "8"]
    assert [(p.index, p.ground_truth, p.row) for p in data.validation_prompts(2)] == [
        (-1, "20", f"{validation}:1"), (-2, "22", f"{validation}:2"),
    ]  # fmt: skip
    assert (data.report.rows, data.report.validation_rows) == (5, 3)
    assert prompts[0].tokens[0] == 1 and len(prompts[0].tokens) == 1 + len(prompts[0].text)


def test_held_out_rows_are_read_without_any_training_file(write_rows: Any, plain_tokenizer: Any) -> None:
    validation = write_rows([row(n) for n in range(3)], "validation.jsonl")
    section = DataSection(train="/nowhere/train.jsonl", validation=validation)
    prompts = load_validation(section, MATHS, plain_tokenizer).validation_prompts(8)
    whole = load_data(section.model_copy(update={"train": validation}), MATHS, plain_tokenizer)
    assert [p.text for p in prompts] == [p.text for p in whole.validation_prompts(8)] and len(prompts) == 3


def test_repeated_prompts_are_dropped_and_counted(write_rows: Any, plain_tokenizer: Any) -> None:
    """Copies with another ground truth are counted separately."""
    train = write_rows([row(1), row(2), row(1), row(1, prompt=" 1+1= "), row(1, answer=3)])
    report = load_data(DataSection(train=train), MATHS, plain_tokenizer).report
    assert (report.rows, report.duplicates, report.contradicting) == (2, 3, 1)
    assert load_data(DataSection(train=train, dedupe=False), MATHS, plain_tokenizer).report.rows == 5


def test_a_copy_of_a_row_is_left_out_before_it_is_read(write_rows, plain_tokenizer, monkeypatch) -> None:
    """An unusable row is reported wherever it is; a copy counts for the first row's domain."""
    read: list[str] = []

    def counted(columns: Any, *, place: str, **options: Any) -> DataRow:
        read.append(place.rpartition(":")[2])
        return read_row(columns, place=place, **options)

    monkeypatch.setattr(load_rows, "read_row", counted)
    once = [row(1), row(2, domain="sums"), row(3, answer=None), row(4, level=1), row(4, level=2)]
    train = write_rows(3 * once)
    section = DataSection.model_validate(
        {"train": train, "columns": {"domain": "domain"}, "unusable": "filter"}
    )
    data = load_data(section, MATHS, plain_tokenizer)
    assert read == ["1", "2", "3", "4", "5", "8", "13"]
    report = data.report
    assert (report.rows, report.duplicates, report.contradicting, report.unusable) == (3, 9, 0, 3)
    assert any(f"3 of 15 rows of {train} are unusable" in note for note in report.notes)
    left_out = {(rows.rule, rows.domain): rows for rows in data.train[0].left_out.rows()}
    assert (left_out["dedupe", "sums"].count, left_out["dedupe", data.train[0].rows[0].domain].count) == (
        2,
        7,
    )
    assert left_out["dedupe", "sums"].examples == [f"{train}:{n}: same prompt as {train}:2" for n in (7, 12)]
    monkeypatch.setattr(load_rows, "read_row", read_row)
    every = load_data(section.model_copy(update={"dedupe": False}), MATHS, plain_tokenizer).report
    assert (every.rows, every.duplicates, every.unusable) == (12, 0, 3)


def test_a_file_whose_rows_are_all_unusable_is_refused_by_a_filter_too(write_rows, plain_tokenizer) -> None:
    with pytest.raises(DataError, match="1 of 1 rows"):
        load_data(
            DataSection(train=write_rows([row(1, answer=None)]), unusable="filter"), MATHS, plain_tokenizer
        )


def test_rows_without_ground_truth_are_counted(write_rows: Any, plain_tokenizer: Any) -> None:
    train = write_rows([row(1), row(2, answer=None)])
    report = load_data(
        DataSection(train=train), RewardSection.model_validate({"kind": "format"}), plain_tokenizer
    ).report
    assert (report.rows, report.without_ground_truth) == (2, 1)


@pytest.mark.parametrize(
    ("columns", "ground_truth"),
    [
        ({"prompt": "q", "solution": "1", "answer": "2"}, "2"),
        ({"prompt": "q", "solution": "1", "ground_truth": "2"}, "1"),
        ({"problem": "q", "solution": "so \\boxed{1}", "answer": "2"}, "2"),
    ],
)
def test_other_columns_go_to_reward_functions(columns, ground_truth, write_rows, plain_tokenizer) -> None:
    (prompt,) = load_data(DataSection(train=write_rows([columns])), MATHS, plain_tokenizer).train[0].rows
    assert prompt.ground_truth == ground_truth
    assert prompt.metadata["solution"] == columns["solution"]


def test_overlong_rows_are_filtered_or_refused_by_number_limit_and_longest(
    write_rows, plain_tokenizer
) -> None:
    rows = [row(n, prompt="x" * n) for n in (30, 45, 5)]
    train = write_rows(rows, "long.jsonl")
    report = load_data(DataSection(train=train, max_prompt_tokens=20), MATHS, plain_tokenizer).report
    assert (report.rows, report.overlong) == (1, 2)
    message = (
        f"{train}: 2 of 3 rows are longer than data.max_prompt_tokens = 20; "
        f"the longest has 46 tokens ({train}:2)"
    )
    assert message in report.text()
    none = write_rows(rows[:2], "none.jsonl")
    for path, rule, way_out in (
        (train, "refuse", "raise the limit or set"),
        (none, "filter", "no row remains"),
    ):
        section = DataSection(train=path, max_prompt_tokens=20, overlong=rule)
        with pytest.raises(DataError, match=rf"2 of [23] rows .* 46 tokens \(.*:2\); {way_out}"):
            load_data(section, MATHS, plain_tokenizer)


def test_a_source_without_rows_says_which_rules_took_them(write_rows: Any, plain_tokenizer: Any) -> None:
    rows = write_rows([row(1), row(2)], "same.jsonl")
    section = DataSection(train=rows, validation=rows, overlap="drop")
    with pytest.raises(DataError, match=r"2 rows dropped by data\.overlap \(the first is .*same\.jsonl:1: "):
        load_data(section, MATHS, plain_tokenizer).stream(0)


def test_overlap_with_validation_is_reported_dropped_or_refused(write_rows, plain_tokenizer) -> None:
    train, held_out = write_rows([row(1), row(2), row(3)], "t.jsonl"), write_rows([row(2)], "v.jsonl")

    def load(rule: str) -> Any:
        return load_data(DataSection(train=train, validation=held_out, overlap=rule), MATHS, plain_tokenizer)

    assert (load("report").report.overlapping, len(load("report").train[0].rows)) == (1, 3)
    dropped = load("drop")
    assert ([p.ground_truth for p in dropped.train[0].rows], dropped.report.rows) == (["2", "6"], 2)
    with pytest.raises(DataError, match=r"t\.jsonl:2 and .*v\.jsonl:1"):
        load("refuse")


def test_bad_rows_are_named_together_and_of_very_many_the_first(
    write_rows: Any, plain_tokenizer: Any
) -> None:
    train = write_rows([row(1), row(2, answer=None), row(3, answer="so \\boxed{}"), row(4, prompt="")])
    with pytest.raises(DataError) as caught:
        load_data(DataSection(train=train), MATHS, plain_tokenizer)
    message = str(caught.value)
    assert "3 of 4 rows" in message
    assert all(f"{train}:{line}:" in message for line in (2, 3, 4))
    assert "no ground truth" in message
    train = write_rows([row(n, answer=None) for n in range(500)])
    with pytest.raises(DataError, match="and 490 more"):
        load_data(DataSection(train=train), MATHS, plain_tokenizer)


def test_ground_truths_that_are_compared_as_text_are_counted(write_rows: Any, plain_tokenizer: Any) -> None:
    train = write_rows([row(1), row(2, answer="\\int_0^1 f(x) dx"), row(3, answer="\\prod_n a_n")])
    notes = load_data(DataSection(train=train), MATHS, plain_tokenizer).report.notes
    assert [
        note
        for note in notes
        if "compares its text" in note and "2 of 3 rows" in note and f"{train}:2" in note
    ]


DOMAINS = {
    "domains": {
        "sums": {"kind": "maths"},
        "code": {"kind": "code"},
        "style": {"parts": [{"kind": "instructions"}, {"kind": "repetition", "weight": 0.1}]},
    }
}


def test_domains_have_their_ground_truths_and_exact_shares(write_rows: Any, plain_tokenizer: Any) -> None:
    sums = write_rows([row(n) for n in range(6)], "sums.jsonl")
    task = {"entry_point": "f", "cases": [{"args": [1], "expected": 2}]}
    code = write_rows([{"prompt": f"write f {n}", "answer": task} for n in range(3)], "code.jsonl")
    style = write_rows([{"prompt": "say", "answer": [{"check": "no_commas"}], "tag": "short"}], "style.jsonl")
    section = DataSection.model_validate(
        {
            "train": [
                {"domain": "sums", "path": sums, "probability": 0.5},
                {"domain": "code", "path": code, "probability": 0.25},
                {"domain": "style", "path": style, "probability": 0.25},
            ],
            "validation": [{"domain": "sums", "path": sums}, {"domain": "code", "path": code}],
        }
    )
    data = load_data(section, RewardSection.model_validate(DOMAINS), plain_tokenizer)
    taken = [p.domain for p in data.stream(seed=0).take(80)]
    assert {d: taken.count(d) for d in set(taken)} == {"sums": 40, "code": 20, "style": 20}
    by_domain = {p.domain: p for p in data.stream(seed=0).take(8)}
    assert by_domain["code"].ground_truth.entry_point == "f"
    assert by_domain["style"].ground_truth["instructions"][0].name == "no_commas"
    assert by_domain["style"].tag == "short"
    assert [p.domain for p in data.validation_prompts(4)] == ["sums", "code", "sums", "code"]


def test_a_domain_without_a_verifier_is_named(write_rows: Any, plain_tokenizer: Any) -> None:
    train = write_rows([row(1, domain="sums"), row(2, domain="musc")])
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: domain 'musc' has no verifier.*\['code', 'style', 'sums'\]"
    ):
        load_data(DataSection(train=train), RewardSection.model_validate(DOMAINS), plain_tokenizer)


def test_probabilities_are_given_for_all_or_none(write_rows: Any) -> None:
    with pytest.raises(ValueError, match="all or none"):
        DataSection.model_validate({"train": [{"path": "a", "probability": 1.0}, {"path": "b"}]})


def test_messages_reach_verifiers_and_tokens_alike(write_rows: Any, chat_tokenizer: Any) -> None:
    train = write_rows([{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}])
    (prompt,) = load_data(DataSection(train=train), MATHS, chat_tokenizer).stream(0).take(1)
    assert prompt.text == "<user>1+1<assistant>"
    assert prompt.messages == ({"role": "user", "content": "1+1"},)


def test_a_validation_file_longer_than_the_default_count_is_a_warning(
    write_rows: Any, plain_tokenizer: Any
) -> None:
    rows = [{"prompt": f"{n} + 0 = ", "answer": str(n)} for n in range(513)]
    section = DataSection(
        train=write_rows(rows[:1], "train.jsonl"), validation=write_rows(rows, "validation.jsonl")
    )
    data = load_data(section, MATHS, plain_tokenizer)
    (warning,) = data.warnings(LoopSection(prompts_per_step=1))
    assert "only the first 512 of 513 validation rows" in warning and "loop.validation.num_prompts" in warning
    chosen = LoopSection.model_validate({"prompts_per_step": 1, "validation": {"num_prompts": 512}})
    assert not data.warnings(chosen)

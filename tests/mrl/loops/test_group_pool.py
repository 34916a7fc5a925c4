"""The folder of a run's judged groups: refused before anything starts, with what to do; empty at the start and at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.errors import ConfigError
from mrl.loops.group_pool import check_pool, open_group_store
from mrl.pool.group_bytes import encode_group, size_of
from mrl.pool.room import admission_of, most_bytes
from mrl.samples import Group, Prompt
from tests.mrl.loops.table_policy import config_of
from tests.support.samples import make_sample, verdict_of

PROMPTS = PromptStream([Prompt(0, np.zeros(1, np.int32), "", None)], seed=0)


def config(tmp_path: Path, *words: str) -> Config:
    return config_of(tmp_path, {}, "loop.schedule=stream", *words)


def a_group(config: Config) -> Group:
    """One of longest prompts and responses, four letters a token."""
    length = config.rollout.max_response_tokens
    samples = (
        make_sample(
            0,
            number,
            num_prompt=config.model.max_length - length,
            length=length,
            response_text="word" * length,
            verdict=verdict_of(1.0),
        )
        for number in range(config.loop.samples_per_prompt)
    )
    return Group(PROMPTS.prompt_at(0), tuple(samples))


def test_what_groups_may_come_to_covers_longest_ones(tmp_path: Path) -> None:
    given = config(tmp_path, "rollout.max_response_tokens=500", "model.max_length=700", "stream.sync_every=2")
    groups = admission_of(given).slots
    size = groups * len(encode_group(a_group(given)))
    assert groups == 3 * 4 and size < most_bytes(given) < 2 * size
    assert groups * size_of(a_group(given)) < most_bytes(given), "in memory too"


def test_a_folder_that_cannot_do_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    other = open_group_store(config(tmp_path, "run.name=other", f"stream.pool.folder={pool}"), PROMPTS)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("")
    found = sorted(tmp_path.rglob("*"))
    for folder, message in {
        pool: f"{pool}: it belongs to the run {tmp_path}/other, not to {tmp_path}/run; name another folder",
        pool / "run": "is no folder",
        tmp_path / "mine": r"holds what is no store's \(thesis.tex\)",
        Path("/proc/self/pool"): "/proc/self/pool: it cannot be written to",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check_pool(config(tmp_path, f"stream.pool.folder={folder}"))
    assert sorted(tmp_path.rglob("*")) == found
    other.remove()
    check_pool(config(tmp_path, f"stream.pool.folder={pool}"))


def test_a_disk_with_too_little_room_is_refused_with_the_estimate(tmp_path: Path) -> None:
    """No disk has a million terabytes; none needs to where memory takes it all."""
    many = ("loop.prompts_per_step=100000000000", "rollout.max_response_tokens=1000", "model.max_length=2000")
    with pytest.raises(
        ConfigError,
        match=r"free, and groups may take \d+.\d GiB more; .* 200000000000 groups of longest responses",
    ):
        check_pool(config(tmp_path, *many))
    check_pool(config(tmp_path, *many, f"stream.pool.memory_bytes={1 << 62}"))
    check_pool(config_of(tmp_path, {}, *many))


@pytest.mark.parametrize("named", [False, True])
def test_a_killed_attempt_leaves_its_run_what_the_next_one_drops(named: bool, tmp_path: Path) -> None:
    words = (f"stream.pool.folder={tmp_path}/pool",) if named else ()
    given = config(tmp_path, "stream.pool.memory_bytes=0", *words)
    folder = tmp_path / ("pool" if named else "run/pool")
    killed = open_group_store(given, PROMPTS)
    killed.put(a_group(given))
    (folder / "00000001.groups").write_bytes(b"of no use to anyone")
    killed.close()
    check_pool(given)
    store = open_group_store(given, PROMPTS)
    assert store.handles == [] and [path.name for path in folder.iterdir()] == ["run"]
    store.put(a_group(given))
    store.remove()
    assert list(folder.iterdir()) == []

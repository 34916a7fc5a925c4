"""kill -9 in every phase is reported soon, with its phase, in one line; the next start resumes.

Each start resumes the previous one and is killed by fault injection (benchmarks/soak/faults.py).
"""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.observe.phases import PHASES
from tests.launch.killed_runs import LASTS, Chain
from tests.launch.tiny_runs import words

pytestmark = pytest.mark.integration

LAYOUT = ("training.layout={tp: 1, pp: 2, ep: 1, dp: 1}", "rollout.tp=2", "loop.deterministic=true")


@pytest.fixture
def chain(task: Path, tmp_path: Path) -> Iterator[Chain]:
    made = Chain(functools.partial(words, task), tmp_path, *LAYOUT, *LASTS)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, object]]]:
    made = Chain(functools.partial(words, task), tmp_path_factory.mktemp("undisturbed"), *LAYOUT, *LASTS)
    made.finish("loop.steps=16")
    yield made.rows()
    made.remove()


@pytest.mark.long
def test_every_kind_of_process_killed_in_some_phase(chain: Chain) -> None:
    """Kill a reward worker, which the run survives, and a trainer rank. For other kinds see
    test_rollout_workers.py, test_engine_over_nodes.py and tests/mrl/loops/test_killed_drivers.py."""
    chain.ended("reward:reward:1,sync:train-1:2")
    done = [(record["target"], record["during"]) for record in chain.injected()]
    assert done == [("reward", "reward"), ("train-1", "sync")]
    last = chain.steps_saved() + 2
    chain.finish(f"loop.steps={last}")
    rows = chain.rows()
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert all(row["reward/no_reward_frac"] == 0 and row["optim/grad_norm"] > 0 for row in rows)
    assert not list(chain.run_folder.glob("checkpoints/*.partial"))


VICTIMS = dict(
    zip(
        PHASES,
        ("vllm-0", "driver", "engine-0", "train-1", "engine-0", "driver", "train-1", "vllm-0"),
        strict=True,
    )
)
"""Each kind of process that ends a run, in two phases: the kind decides how, the phase what was saved."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phases", [PHASES[:4], PHASES[4:]], ids="-".join)
def test_deaths_in_each_phase_change_nothing(phases, chain, undisturbed) -> None:
    """Rows after a series of deaths equal those without, to the last bit."""
    for phase in phases:
        chain.killed(phase, VICTIMS[phase])
    last = chain.steps_saved() + 1
    chain.finish(f"loop.steps={last}")
    assert len(chain.rows()) == last and chain.rows() == undisturbed[:last]


@pytest.mark.slow
def test_two_interrupts_end_a_run_whose_rank_stands_still(chain: Chain) -> None:
    with chain.start("loop.steps=1000") as command:
        command.wait_for("step 2/1000", seconds=400)
        command.worker(chain.run_folder / "logs/latest/train-1.log").suspend()
        command.send(signal.SIGINT)
        command.wait_for("send it again to exit now", seconds=400)
        command.send(signal.SIGINT)
        assert command.wait(seconds=400) == 128 + signal.SIGINT
        chain.assert_nothing_left(command)
    assert "SIGINT again: exiting now" in command.output


@pytest.mark.slow
def test_a_stopped_rank_is_found_at_the_deadline(chain: Chain) -> None:
    """A stopped rank seems alive, so it is reported after the phase's deadline, like a death."""
    with chain.start("loop.steps=1000", "loop.phase_deadline_seconds=20") as command:
        command.wait_for("step 2/1000", seconds=400)
        command.worker(chain.run_folder / "logs/latest/train-1.log").suspend()
        assert command.wait(seconds=400) == 1, command.output[-3000:]
        chain.assert_nothing_left(command)
    assert re.search("trainer rank 1 did not respond within 20 s in phase ", command.output), command.output[
        -2000:
    ]

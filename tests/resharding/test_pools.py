"""Weight syncs between processes without shared memory: every byte, errors stop all, receivers change."""

import pytest

from mrl.models.layout import Layout
from tests.ranks import run_ranks
from tests.resharding.pools import Step, one_process

ONE_BREAKS = (Step(-1, 0), Step(0, 1, breaks=True), Step(0, 1), Step(1, 2, whole=True))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("layout", "receivers", "transport"),
    [
        pytest.param(Layout(), 2, "auto", marks=pytest.mark.slow),
        (Layout(tp=2, ep=2), 1, "auto"),
        (Layout(), 2, "distributed"),
        (Layout(pp=2), 1, "distributed"),
        (Layout(tp=2, ep=2), 2, "distributed"),
        (Layout(pp=2), 1, "nixl"),
        (Layout(tp=2, ep=2), 2, "nixl"),
    ],
    ids=str,
)
def test_separate_pools_get_every_byte_and_one_receivers_error_stops_all(
    layout: Layout, receivers: int, transport: str
) -> None:
    """Sync by boxes around a broken session, then whole, with fewer and more receivers than trainers."""
    size = layout.world_size
    results = run_ranks(one_process, size + receivers, layout, transport, ONE_BREAKS, seconds=240)
    summary = results[0][2]
    assert summary["bytes_local"] == 0
    assert summary["bytes_needed"] == summary["lower_bound_cross_slot_bytes"]
    broken = f"broken on purpose in window {min(2, summary['windows'] - 1)}"
    for figures, errors, _ in results[:size]:
        assert len(figures) == 3 and errors.keys() == {1} and broken in errors[1]
    assert sum(r[0][0]["cross_slot_bytes"] for r in results[:size]) == summary["bytes_needed"]
    for versions, errors in results[size:]:
        assert versions == [0, 0, 1, 2] and len(errors) == 1
    assert broken in results[-1][1][0]


ONE_IS_REPLACED = (
    Step(-1, 0),
    Step(0, 1, breaks=True),
    Step(None, 1, absent=(1,)),
    Step(1, 2, absent=(1,)),
    Step(None, 3, joins=True),
    Step(3, 4),
    Step(None, 4, absent=(0,)),  # one alone, that has the version already
    Step(4, 5),
)


@pytest.mark.integration
@pytest.mark.parametrize("transport", ["distributed", "nixl"])
def test_one_copy_crosses_into_a_node_and_its_other_engine_ranks_read_it_there(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sync around a broken session, without a receiver, and with the one that replaces it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    results = run_ranks(one_process, 4, Layout(dp=2), transport, ONE_IS_REPLACED, True, seconds=240)
    summary = results[0][2]
    assert summary["bytes_intra_node"] > 0
    assert summary["bytes_intra_node"] + summary["bytes_inter_node"] == summary["bytes_needed"]
    for figures, errors, _ in results[:2]:
        assert len(figures) == 7 and errors.keys() == {1} and "broken on purpose" in errors[1]
    assert [versions for versions, _ in results[2:]] == [[0, 0, 1, 2, 3, 4, 5], [0, 0, 3, 4, 4, 5]]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("layout", "transport"),
    [
        (Layout(tp=2, ep=2), "auto"),
        (Layout(tp=2, ep=2), "distributed"),
        pytest.param(Layout(), "distributed", marks=pytest.mark.slow),
        pytest.param(Layout(), "nixl", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sessions_go_on_without_a_receiver_and_with_the_one_that_replaces_it(
    layout: Layout, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    size = layout.world_size
    results = run_ranks(one_process, size + 2, layout, transport, ONE_IS_REPLACED, seconds=240)
    for figures, errors, _ in results[:size]:
        assert len(figures) == 7 and errors.keys() == {1} and "broken on purpose" in errors[1]
    assert [versions for versions, _ in results[size:]] == [[0, 0, 1, 2, 3, 4, 5], [0, 0, 3, 4, 4, 5]]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("transport", "together", "delta"),
    [("distributed", True, "off"), ("nixl", True, "off"), ("distributed", False, "on")],
)
def test_sessions_that_are_taken_before_they_are_loaded(
    transport: str, together: bool, delta: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's parameters change once all is taken; the last receiver fails while it loads, is left
    out, and is replaced. `together`: receivers read each other's buckets when they load."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    arguments = (Layout(dp=2), transport, ONE_IS_REPLACED, together, delta, "on")
    results = run_ranks(one_process, 4, *arguments, seconds=240)
    for figures, errors, _ in results[:2]:
        assert len(figures) == 7 and errors.keys() == {1} and "broken on purpose" in errors[1]
    assert [versions for versions, _ in results[2:]] == [[0, 0, 1, 2, 3, 4, 5], [0, 0, 3, 4, 4, 5]]


UNCHANGED = (
    Step(-1, 0),
    Step(0, 1, content=0),
    Step(1, 2),
    Step(2, 3, content=2, breaks=True),
    Step(None, 3, content=2, absent=(1,)),
    Step(3, 4, content=2, absent=(1,)),
    Step(None, 5, content=2, joins=True),
    Step(5, 6, content=2),
)
"""Versions 1, 3, 4, 5 and 6 are equal to the ones before."""


@pytest.mark.integration
@pytest.mark.parametrize("together", [False, True])
def test_what_did_not_change_is_not_sent_and_a_late_joiner_gets_everything(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sync equal and new weights, around a broken session, without a receiver, and with its replacement."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    results = run_ranks(one_process, 4, Layout(dp=2), "distributed", UNCHANGED, together, "on", seconds=240)
    sent = [sum(r[0][n]["sent_bytes"] for r in results[:2]) for n in range(7)]
    whole = sent[0]
    assert sent[2] == whole, "all weights are new"
    assert sent[1] < 0.1 * whole and sent[6] < 0.1 * whole, "nothing changed since the version before"
    assert sent[4] < 0.1 * sent[3], "the receiver that stayed has version 3"
    assert 0.4 * whole < sent[5], "the late joiner has nothing"
    for figures, errors, _ in results[:2]:
        assert len(figures) == 7 and errors.keys() == {3} and "broken on purpose" in errors[3]
    assert [versions for versions, _ in results[2:]] == [[0, 1, 2, 2, 3, 4, 5, 6], [0, 1, 2, 2, 5, 6]]

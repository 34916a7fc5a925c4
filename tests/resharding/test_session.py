"""States of a receiver: valid transitions, and failed is final."""

import pytest

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.resharding.transfer.session import ReceiverProgress, ReceiverState, Session


def committed(version: int) -> ReceiverProgress:
    progress = ReceiverProgress()
    for v in range(version + 1):
        progress.prepare(Session.new(v - 1, v, "d"))
        progress.receiving()
        progress.verified()
        progress.commit()
    return progress


def test_a_version_is_visible_only_after_commit() -> None:
    progress = ReceiverProgress()
    assert not progress.serving and progress.version == -1
    progress.prepare(Session.new(-1, 0, "d"))
    progress.receiving()
    progress.verified()
    assert not progress.serving and progress.version == -1
    progress.commit()
    assert progress.serving and progress.version == 0


def test_failed_is_sticky_until_a_full_session_commits() -> None:
    progress = committed(3)
    progress.prepare(Session.new(3, 4, "d"))
    progress.receiving()
    progress.fail()
    assert not progress.serving and progress.version == 3
    progress.prepare(Session.new(3, 4, "d"))
    assert not progress.serving
    progress.receiving()
    progress.verified()
    progress.commit()
    assert progress.serving and progress.version == 4


@pytest.mark.parametrize(("start", "end"), [(1, 2), (3, 3), (3, 2), (4, 5), (-1, 0)])
def test_a_session_that_does_not_follow_is_refused(start: int, end: int) -> None:
    progress = committed(3)
    with pytest.raises(WeightSyncError, match="committed version 3"):
        progress.prepare(Session.new(start, end, "d"))
    assert progress.serving


def test_two_sessions_at_once_are_refused() -> None:
    progress = committed(0)
    first = Session.new(0, 1, "d")
    progress.prepare(first)
    with pytest.raises(WeightSyncError, match="still open"):
        progress.prepare(Session.new(0, 1, "d"))
    assert progress.session == first


def test_lost_weights_may_come_again_as_the_same_version() -> None:
    progress = committed(3)
    progress.fail()
    assert not progress.serving
    progress.prepare(Session.new(3, 3, "d"))
    progress.receiving()
    progress.verified()
    progress.commit()
    assert progress.serving and progress.version == 3


def test_an_engine_without_a_version_has_none_to_repeat() -> None:
    progress = ReceiverProgress()
    progress.prepare(Session.new(-1, 0, "d"))
    progress.fail()
    with pytest.raises(WeightSyncError, match="committed version -1"):
        progress.prepare(Session.new(-1, -1, "d"))


@pytest.mark.parametrize("call", ["receiving", "verified", "commit"])
def test_illegal_transitions_are_typed_errors(call: str) -> None:
    progress = committed(0)
    progress.session = Session.new(0, 1, "d")
    with pytest.raises(WeightSyncError, match="cannot go from committed"):
        getattr(progress, call)()
    assert progress.state is ReceiverState.COMMITTED


def test_full_comes_after_starts_and_failures_and_every_so_many_versions() -> None:
    sync = SyncSection(verify_every=3)
    proved: int | None = None
    full = []
    for version in range(8):
        if sync.needs_full_verify(proved, version):
            full.append(version)
            proved = version
    assert full == [0, 3, 6] and sync.needs_full_verify(None, 7)
    assert not SyncSection(verify="wire").needs_full_verify(None, 0)


def test_a_session_from_any_version_heals_and_never_goes_back() -> None:
    """If a receiver is lost during a commit, only some of the others have the version."""
    new, failed = ReceiverProgress(), committed(3)
    failed.prepare(Session.new(3, 4, "d"))
    failed.fail()
    for progress in (new, failed, committed(4)):
        progress.prepare(Session.new(None, 4, "d"))
        assert not progress.serving
        progress.receiving()
        progress.verified()
        progress.commit()
        assert progress.serving and progress.version == 4
    with pytest.raises(WeightSyncError, match="committed version 4"):
        failed.prepare(Session.new(None, 3, "d"))
    with pytest.raises(WeightSyncError, match="committed version -1"):
        ReceiverProgress().prepare(Session.new(None, -1, "d"))

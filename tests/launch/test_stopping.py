"""Requests to leave, at whatever moment they come."""

import contextlib
import os
import signal

import pytest

from launch.stopping import REQUEUE_EXIT_CODE, StopSignals


def test_a_request_before_the_first_step_that_other_code_swallows_is_not_lost() -> None:
    """As a destructor or a callback does with an exception: it is raised again before the first step."""
    with StopSignals() as signals:
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt, match="SIGUSR1"):
            signals.begin_steps()
        assert not signals.stepping
    assert signals.exit_code == REQUEUE_EXIT_CODE


def test_a_request_in_a_step_waits_for_its_end() -> None:
    with StopSignals() as signals:
        signals.begin_steps()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.reason() == "SIGTERM"
    assert signals.exit_code == 128 + signal.SIGTERM

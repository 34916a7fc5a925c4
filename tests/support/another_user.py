"""Another user of this machine; only root can act as one."""

import os

import pytest

NOBODY = 65534
by_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

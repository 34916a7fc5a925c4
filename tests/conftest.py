"""Settings of every test: quiet offline engines, few threads, and a check that nothing is left."""

import contextlib
import gc
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import data_sets
from tests.engines import ENGINE_SHAPE, EngineHost, host_of
from tests.nightly import hidden_markers, is_left_out, is_nightly
from tests.tiny_models import write_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray ends workers when the machine's memory is almost in use, whoever uses it.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

gc.disable()  # until all tests are collected: looking for what imports could drop takes a fifth of their time

OF_RANKS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP", "MASTER_ADDR", "MASTER_PORT")
OF_RANKS += ("RANK", "WORLD_SIZE", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "MRL_SESSION", "CUDA_VISIBLE_DEVICES")
"""Variables that tell a process its place among others."""
SERVANTS = ("resource_tracker", "multiprocessing.forkserver")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore a file, with its imports, if `-m` deselects all its tests; imports dominate a worker's start."""
    is_file_of_tests = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return (is_file_of_tests and is_left_out(collection_path, config.option.markexpr)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of tests/nightly.py as slow, and put long tests first.

    Raises UsageError for hidden markers, or if the fast part imports vLLM.
    """
    for item in items:
        if is_nightly(item.nodeid):
            item.add_marker(pytest.mark.slow)
        markers = {name for name in ("integration", "slow") if item.get_closest_marker(name)}
        if hidden := hidden_markers(item.path, markers):
            raise pytest.UsageError(
                f"{item.nodeid} is marked {hidden}: its file must say so, as mark.{hidden[0]}"
            )
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if config.option.markexpr.startswith("not integration") and "vllm" in sys.modules:
        raise pytest.UsageError(
            "a file of the fast part imports vllm: mark it integration, or import it where it is used"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Freeze imported objects, so that no test pays for garbage collection of them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many rows the tests of data sets have."""
    terminalreporter.write_line(data_sets.summary())


@pytest.fixture(autouse=True)
def addresses_of_ranks() -> Iterator[None]:
    """Check that no rank, node or session of a test is in the environment of the tests after it."""
    before = {name: os.environ.get(name) for name in OF_RANKS}
    yield
    left = {name: os.environ.get(name) for name in OF_RANKS if os.environ.get(name) != before[name]}
    for name in left:
        if (value := before[name]) is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    assert not left, f"left in the environment: {left}"


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Check that the session leaves no process and no segment of an ended process in shared memory."""
    before = _orphaned_segments()
    yield
    if (kept := sys.modules.get("tests.forks.servers")) is not None:
        kept.close()
    left = [p for p in psutil.Process().children(recursive=True) if not _ends_with_us(p)]
    _, alive = psutil.wait_procs(left, timeout=10)
    names = [(p.pid, p.name()) for p in alive if p.is_running()]
    deadline = time.monotonic() + 10
    while (segments := _orphaned_segments() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not names, f"processes left by the tests: {names}"
    assert not segments, f"shared memory left by the tests: {sorted(segments)}"


def _orphaned_segments(folder: Path = Path("/dev/shm")) -> set[str]:
    """Return torch's shared memory files of this user whose maker (a pid in the name) ended."""
    names = set()
    for path in folder.glob("torch_*"):
        maker = re.match(r"torch_(\d+)_", path.name)
        with contextlib.suppress(FileNotFoundError):  # its maker is done with it
            is_own = path.stat().st_uid == os.getuid()
            if maker and is_own and not psutil.pid_exists(int(maker[1])):
                names.add(path.name)
    return names


def _ends_with_us(process: psutil.Process) -> bool:
    """Return True for helpers that end with this process; what they forked does not."""
    words = " ".join(_words(process))
    return process.ppid() == os.getpid() and any(servant in words for servant in SERVANTS)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def strange_folder(tmp_path: Path) -> Path:
    """Return a user's folder whose packages have our names and raise on import."""
    for name in ("models", "launch", "resharding", "benchmarks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('this is not mrl.{name}')\n")
    return tmp_path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), **ENGINE_SHAPE)


@pytest.fixture(scope="session")
def tiny_engine(tiny_model: Path) -> Iterator[EngineHost]:
    """Start an engine of tp 1 for a session's tests, which send their own weights."""
    from mrl.config.sections.sync import SyncSection

    sync = SyncSection(bucket_bytes=64 << 10, deadline_seconds=90.0)
    host = host_of(tiny_model, engine={"stop_token_ids": (1,), "sync": sync})
    yield host
    host.close()


@pytest.fixture(scope="session")
def golden_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.golden_run import write_golden_model  # imports Megatron

    return write_golden_model(tmp_path_factory.mktemp("golden") / "model")


@pytest.fixture
def golden_run(golden_model: Path, tmp_path: Path) -> Path:
    """Return the folder of a run of 128 ranks with the golden checkpoint."""
    from tests.golden_run import write_run

    return write_run(tmp_path, golden_model)

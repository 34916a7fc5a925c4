"""Compiled code comes from this user's folder, whoever made torch's default first."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from mrl import compile_cache
from mrl.errors import ConfigError
from tests.support.another_user import NOBODY, by_root


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return torch's default folder, which does not exist yet, with an empty home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in (
        compile_cache.VARIABLE,
        compile_cache.EXTENSIONS,
        "XDG_CACHE_HOME",
        *compile_cache.OF_OTHERS,
    ):
        monkeypatch.setenv(variable, "")  # what a test sets is taken back after it
        monkeypatch.delenv(variable)
    monkeypatch.setenv(compile_cache.HEADERS, "1")
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return compile_cache.default()


def test_the_default_is_torchs(default: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert str(default) == default_cache_dir()


def test_a_default_that_nobody_has_becomes_the_users(default: Path) -> None:
    compile_cache.use_own_compile_cache()
    assert os.environ[compile_cache.VARIABLE] == str(default)
    assert default.stat().st_mode & 0o777 == 0o700 and os.environ[compile_cache.HEADERS] == "1"


@by_root
@pytest.mark.parametrize("is_set", [False, True])
def test_another_users_default_is_left_alone(default, is_set, monkeypatch) -> None:
    default.mkdir(mode=0o777)
    os.chown(default, NOBODY, NOBODY)
    if is_set:  # as torch says once its compiler is imported
        monkeypatch.setenv(compile_cache.VARIABLE, str(default))
    compile_cache.use_own_compile_cache()
    path = Path(os.environ[compile_cache.VARIABLE])
    assert path == default.parent / "home/.cache/mrl/torchinductor" and path.stat().st_mode & 0o777 == 0o700
    assert os.environ[compile_cache.HEADERS] == "0", "torch keeps these in its default folder"
    os.environ["TRITON_CACHE_DIR"] = str(default / "triton")  # the choice of a driver on another node
    compile_cache.use_own_compile_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(path / "triton")
    os.chown(path, NOBODY, NOBODY)
    monkeypatch.setenv(compile_cache.VARIABLE, str(default))
    with pytest.raises(ConfigError, match="TORCHINDUCTOR_CACHE_DIR"):
        compile_cache.use_own_compile_cache()


def test_a_link_in_the_defaults_place_is_not_followed(default: Path) -> None:
    (default.parent / "linked").mkdir()
    default.symlink_to("linked")
    compile_cache.use_own_compile_cache()
    assert Path(os.environ[compile_cache.VARIABLE]).is_relative_to(default.parent / "home")


@pytest.mark.parametrize("home", ["home", "/proc/self"])
def test_extensions_are_kept_below_a_home_that_can_be_written(home, default, monkeypatch) -> None:
    """Otherwise with the other compiled code; nobody can make a folder in /proc/self."""
    monkeypatch.setenv("HOME", str(default.parent / home))
    compile_cache.use_own_compile_cache()
    elsewhere = None if home == "home" else f"{default}/extensions"
    assert os.environ.get(compile_cache.EXTENSIONS) == elsewhere


def test_a_folder_of_the_users_choice_stays(default, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "chosen"))
    compile_cache.use_own_compile_cache()
    assert os.environ[compile_cache.VARIABLE] == str(tmp_path / "chosen") and not default.exists()


def test_other_compilers_keep_their_code_on_the_node(default, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/chosen")
    compile_cache.use_own_compile_cache()
    assert os.environ["TRITON_CACHE_DIR"] == f"{default}/triton"
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == f"{default}/flashinfer"
    assert os.environ["VLLM_CACHE_ROOT"] == "/chosen"


def test_the_environment_s_programs_are_found_by_name(default: Path) -> None:
    """A batch script that calls .venv/bin/python has not put its folder on PATH, and vLLM looks for ninja."""
    compile_cache.use_own_compile_cache()
    compile_cache.use_own_compile_cache()
    assert os.environ["PATH"].split(os.pathsep) == [os.path.dirname(sys.executable), "/usr/bin"]

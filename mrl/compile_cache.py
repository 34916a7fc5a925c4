"""Choose folders of this user and node for compiled code.

torch runs what is in its default, torchinductor_USER in the folder for temporary files, which belongs to
whoever creates it first. Extensions, of which Megatron has one, are kept below the home, which may not be
writable on a cluster. Triton, vLLM (with DeepGEMM) and FlashInfer also compile below the home: on a shared
home the engines of all nodes wait for each other's file locks.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import sys
import tempfile
from pathlib import Path

from mrl.errors import ConfigError
from mrl.files import is_own_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
"""Variable, 1 by default, for headers that torch keeps in its default folder whatever `VARIABLE` says."""
EXTENSIONS = "TORCH_EXTENSIONS_DIR"
OF_OTHERS = {
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Variables of other compilers -> their folders inside torch's."""
_PREFIX = "torchinductor_"


def use_own_compile_cache() -> None:
    """Make this process and its children take compiled code from this user's folders.

    The compiler's is torch's default, or one below ~/.cache if another user owns the default. Extensions use
    torch's default too, or a folder in the compiler's if the home is not writable. Other compilers use
    folders in torch's. A folder that the user set stays. The programs of this environment come first on
    PATH: FlashInfer, which vLLM leaves out without ninja, starts it by name.

    Raises:
        ConfigError: If both folders of the compiler belong to another user.
    """
    _use_own_inductor_folder()
    if EXTENSIONS not in os.environ and not _can_be_made(_home_cache() / "torch_extensions"):
        os.environ[EXTENSIONS] = os.path.join(os.environ[VARIABLE], "extensions")
    for name, folder in OF_OTHERS.items():
        given = os.environ.get(name)
        if given is None or Path(given).parent.name.startswith(_PREFIX):  # the choice of a driver elsewhere
            os.environ[name] = os.path.join(os.environ[VARIABLE], folder)
    programs, path = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
    if programs not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([programs, path])


def _home_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME", "/"), ".cache"))


def _can_be_made(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK | os.X_OK)


def _use_own_inductor_folder() -> None:
    first = Path(os.environ.get(VARIABLE) or default())
    if not first.name.startswith(_PREFIX):
        return  # torch itself names its default there once it is imported
    second = Path(os.environ.get("HOME", "/"), ".cache/mrl/torchinductor")
    for folder in (first, second):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_own_folder(folder):
            break
    else:
        raise ConfigError(
            f"torch runs code from {first}, which belongs to another user, and {second} cannot be created; "
            f"set {VARIABLE} to a folder of yours"
        )
    os.environ[VARIABLE] = str(folder)
    if folder is second:
        os.environ[HEADERS] = "0"


def default() -> Path:
    """Return torch's default (torch/_inductor/runtime/cache_dir_utils.py)."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), _PREFIX + re.sub(r'[\\/:*?"<>|]', "_", user))

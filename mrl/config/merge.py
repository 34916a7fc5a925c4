"""Merge YAML files, mappings and `a.b.c=value` overrides into one tree that remembers the origin of each
value.

The grammar of overrides is verl's and Hydra's: `a.b.c=value`, the value read as YAML (`null`, `[1, 2]`,
quotes, numbers). The schema is in mrl/config/load.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mrl.errors import ConfigError
from mrl.files import shipped

Origins = dict[str, str]
"""Dotted path -> "file:line", "mapping N" or "command line"."""
MOST_VALUES = 100_000
"""Most values in a file, with every reference expanded."""
MAX_VALUE_CHARS = 400
"""Most characters of a value in an error."""


def merge(
    files: Iterable[str | Path | Mapping[str, Any]],
    overrides: Iterable[str] = (),
    *,
    choices: Mapping[str, tuple[str, str]] | None = None,
) -> tuple[dict[str, Any], Origins]:
    """Merge files, and mappings of the same form, left to right, then all overrides at once.

    Later values win, mappings are merged, lists are replaced. An override `a=null` leaves nothing of an
    earlier `a`.

    Args:
        choices: Dotted paths of mappings in which one key decides what the others mean, with that key and its
            default; a new choice empties the mapping.
    """
    tree: dict[str, Any] = {}
    origins: Origins = {}
    last: dict[str, Any] = {}
    for override in overrides:
        _join(last, _parse_override(override))
    for layer in (*(_layer(file, number) for number, file in enumerate(files, 1)), last):
        for path, (key, usual) in (choices or {}).items():
            _drop_other_choice(tree, origins, layer, path, key=key, usual=usual)
        _overlay(tree, origins, layer, "")
    return tree, origins


class _Located:
    """Leaf with its origin."""

    def __init__(self, value: Any, origin: str) -> None:
        self.value, self.origin = value, origin


class _Alone(dict[str, Any]):
    """Mapping whose key an earlier override of the same layer set to a value: lower layers add nothing."""


def _layer(source: str | Path | Mapping[str, Any], number: int) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return {str(key): _locate(value, f"mapping {number}") for key, value in source.items()}
    return _read(shipped(Path(source)))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"configuration file {path} does not exist")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from error
    node = _composed(text, f"{path} is not readable YAML")
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: expected a mapping of sections at the top")
    return _mapping(node, path)


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-6 as a number, and on, off, yes and no as words, as YAML 1.2 does; refuses
    duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if duplicate := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(
                None, None, f"duplicate key '{duplicate}'", node.start_mark
            )
        return super().construct_mapping(node, deep)


_BOOL = "tag:yaml.org,2002:bool"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _composed(text: str, refusal: str) -> yaml.Node | None:
    """Return the nodes of a text; refuse one that contains itself or expands to too many values."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is not None and _num_values(node, {}) > MOST_VALUES:
            raise ConfigError(f"{refusal}: its references (*name) expand to more than {MOST_VALUES} values")
    except yaml.YAMLError as error:
        raise ConfigError(f"{refusal}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{refusal}: it is nested too deeply, or contains itself") from error
    return node


def _num_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of nodes with references expanded; raise RecursionError if one contains itself."""
    if id(node) not in counts:
        inner = (
            [part for entry in node.value for part in entry]
            if isinstance(node, yaml.MappingNode)
            else node.value
        )
        counts[id(node)] = 1 + sum(
            _num_values(entry, counts) for entry in inner if isinstance(entry, yaml.Node)
        )
    return counts[id(node)]


def tree_of(text: str) -> Any:
    """Return the values of a YAML text from outside this program.

    Raise ConfigError if it is not readable, or if its references expand to more than MOST_VALUES values.
    """
    node = _composed(text, "it is not readable YAML")
    return None if node is None else _construct(node, "it")


def _mapping(node: yaml.MappingNode, path: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        origin = f"{path}:{key_node.start_mark.line + 1}"
        key = str(_construct(key_node, origin))
        if key in result:
            raise ConfigError(f"{origin}: duplicate key '{key}' in this section")
        if isinstance(value_node, yaml.MappingNode):
            result[key] = _mapping(value_node, path)
        else:
            result[key] = _Located(_construct(value_node, origin), origin)
    return result


def _construct(node: yaml.Node, place: str) -> Any:
    """Return the value of a node; PyYAML raises ValueError or AttributeError for malformed dates."""
    loader = _Loader("")
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{place}: the value is not readable: {error}") from error
    finally:
        loader.dispose()


def _parse_override(override: str) -> dict[str, Any]:
    name, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w]*(\.[A-Za-z_][\w]*)*", name):
        raise ConfigError(
            f"'{override[:MAX_VALUE_CHARS]}' is neither a configuration file nor an override a.b.c=value"
        )
    node = _composed(text, f"the value in '{override[:MAX_VALUE_CHARS]}' is not readable")
    value = None if node is None else _construct(node, f"the value in '{override[:MAX_VALUE_CHARS]}'")
    tree: Any = _locate(value, f"command line ({override[:MAX_VALUE_CHARS]})")
    for key in reversed(name.split(".")):
        tree = {key: tree}
    return tree


def _locate(value: Any, origin: str) -> Any:
    if isinstance(value, dict):
        return {str(k): _locate(v, origin) for k, v in value.items()}
    return _Located(value, origin)


def _join(tree: dict[str, Any], new: dict[str, Any]) -> None:
    """Merge `new` into `tree`, both with located leaves."""
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _join(tree[key], value)
        else:
            tree[key] = _Alone(value) if isinstance(value, dict) and key in tree else value


def _drop_other_choice(
    tree: dict[str, Any], origins: Origins, layer: dict[str, Any], path: str, *, key: str, usual: str
) -> None:
    """Empty the mapping at `path` if `layer` makes another choice."""
    old, new = _at(tree, path), _at(layer, path)
    if key not in new or new[key].value == old.get(key, usual):
        return
    old.clear()
    for dropped in [key for key in origins if key.startswith(path + ".")]:
        del origins[dropped]


def _at(tree: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the mapping at a dotted path; empty if there is none."""
    node: Any = tree
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _overlay(tree: dict[str, Any], origins: Origins, new: dict[str, Any], prefix: str) -> None:
    for key, value in new.items():
        path = prefix + key
        if isinstance(value, _Located):
            tree[key], origins[path] = value.value, value.origin
            continue
        if isinstance(value, _Alone) or not isinstance(tree.get(key), dict):
            tree[key] = {}
        _overlay(tree[key], origins, value, path + ".")

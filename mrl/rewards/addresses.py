"""Checks of the server addresses that verifiers use, and the proxies to reach them."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Collection, Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Proxy:
    """Proxy from an environment variable."""

    variable: str
    url: str


def address_faults(path: str) -> Iterator[str]:
    """Yield faults in the `path` of a judge model's verifier: credentials (not shown) or no http address."""
    if "@" in path.partition("://")[2].partition("/")[0]:
        yield (
            "path contains a user name or a password, which would end up in config.yaml, logs and "
            "reasons; put the key into an environment variable instead and name it in server.api_key_env"
        )
        return
    parts = urlsplit(path)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield f"path = {path!r}: a judge model's path is an http:// or https:// address"


def proxy_of(url: str, schemes: Collection[str] = ("http", "https")) -> Proxy | None:
    """Return the environment's proxy for an address; None for loopback and NO_PROXY hosts.

    Args:
        schemes: Proxy schemes that the caller supports.

    Raises:
        ConfigError: The proxy has another scheme.
    """
    parts = urlsplit(url)
    if _is_loopback(parts.hostname or "") or proxy_bypass_environment(parts.netloc):
        return None
    known = getproxies_environment()
    kind = next((kind for kind in (parts.scheme, "all") if known.get(kind)), None)
    if kind is None:
        return None
    names = (f"{kind}_proxy", f"{kind.upper()}_PROXY")
    variable = next((name for name in names if os.environ.get(name)), names[0])
    proxy = known[kind] if "://" in known[kind] else f"http://{known[kind]}"
    if (scheme := urlsplit(proxy).scheme) not in schemes:
        raise ConfigError(
            f"{variable} names a {scheme} proxy, which cannot be used to reach {parts.hostname}; set an http "
            f"proxy, or add {parts.hostname} to NO_PROXY"
        )
    return Proxy(variable, proxy)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")

"""Addresses of servers that verifiers ask: what they may contain, and the proxy that leads to them."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from collections.abc import Collection, Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined] no stub has it

from mrl.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that the environment names."""

    variable: str
    url: str


def address_faults(path: str) -> Iterator[str]:
    """Yield what is wrong with the `path` of a verifier that asks a model that judges: a user name or a password in it, which is not
    shown, or no http address."""
    if "@" in path.partition("://")[2].partition("/")[0]:
        yield (
            "path contains a user name or a password, which would end up in config.yaml, logs and reasons; leave it out: put "
            "the key into an environment variable and name that in server.api_key_env"
        )
        return
    parts = urlsplit(path)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield f"path = {path!r}: a model that judges is an http:// or https:// address"


def proxy_of(url: str, schemes: Collection[str] = ("http", "https")) -> Proxy | None:
    """Return the proxy that the environment names for an address; None for loopback and for what NO_PROXY names.

    Args:
        schemes: of the proxies that the caller can use.

    Raises:
        ConfigError: the proxy has another scheme.
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
            f"{variable} names a {scheme} proxy, which cannot be used to ask {parts.hostname}; set an http proxy, or add "
            f"{parts.hostname} to NO_PROXY"
        )
    return Proxy(variable, proxy)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")

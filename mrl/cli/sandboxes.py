"""`mrl sandboxes`: serve this machine's sandboxes to runs on other machines."""

from __future__ import annotations

import argparse
import json

from mrl.cli.common import add_command
from mrl.errors import ConfigError


def add_sandboxes_to(commands) -> None:
    """Add the command and its arguments."""
    command = add_command(commands, "sandboxes", "serve this machine's sandboxes to runs on other machines")
    command.add_argument(
        "--key-file",
        help="file of mode 0600 with the key that clients need; drawn if there is no such file. By default "
        "the variable MRL_SANDBOX_KEY has the key",
    )
    text = "address to listen on; 127.0.0.1:8700 by default. Port 0 chooses a free one"
    command.add_argument("--listen", default="127.0.0.1:8700", metavar="HOST:PORT", help=text)
    command.add_argument("--certificate", help="TLS certificate (PEM); needed to listen on a network")
    command.add_argument("--private-key", help="key of the certificate (PEM), if it is another file")
    text = "listen on a network without TLS: everybody on it can read the key and all files"
    command.add_argument("--plain", action="store_true", help=text)
    text = (
        "bubblewrap (the default), docker, podman, an entry point of mrl.sandboxes, or package.module:Class"
    )
    command.add_argument("--kind", default="bubblewrap", help=text)
    text = 'arguments of the kind\'s class, e.g. {"arguments": ["--runtime", "runsc"]}'
    command.add_argument("--options", type=json.loads, default={}, metavar="JSON", help=text)
    text = "images that clients may name (* matches anything; folders without links); none by default"
    command.add_argument("--image", action="append", default=[], metavar="PATTERN", help=text)
    text = "make a folder of this machine readable in every sandbox"
    command.add_argument("--mount", action="append", default=[], metavar="HERE:INSIDE", help=text)
    text = "maximum number of open sandboxes; further ones wait; 32 by default"
    command.add_argument("--sandboxes", type=int, default=32, help=text)
    text = "maximum number of sandboxes that boot at once; 8 by default"
    command.add_argument("--boots", type=int, default=8, help=text)
    text = "end a sandbox whose client is silent for so many seconds; 60 by default"
    command.add_argument("--lease", type=float, default=60.0, metavar="SECONDS", help=text)
    command.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    from mrl.agents.sandboxes.providers import find_provider
    from mrl.agents.sandboxes.remote.sandbox_messages import make_key, read_key

    try:
        from mrl.agents.sandboxes.remote.sandbox_server import SandboxRules, ServerOptions, serve_sandboxes
    except ModuleNotFoundError as error:
        raise ConfigError(f"mrl sandboxes needs the package {error.name}: install mrl[agents]") from error

    host, _, port = options.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--listen {options.listen} must look like HOST:PORT, e.g. 127.0.0.1:8700")
    mounts = [mount.partition(":") for mount in options.mount]
    if not all(here.startswith("/") and inside.startswith("/") for here, _, inside in mounts):
        raise ConfigError("--mount must look like HERE:INSIDE, two absolute paths")
    if min(options.sandboxes, options.boots) < 1 or options.lease <= 0:
        raise ConfigError("--sandboxes, --boots and --lease must be positive")
    find_provider(options.kind, options.options)
    if options.key_file is not None and make_key(options.key_file):
        print(f"wrote a new key to {options.key_file}; clients need a copy of it", flush=True)
    serve_sandboxes(
        ServerOptions(
            host=host.strip("[]"),
            port=int(port),
            key=read_key(options.key_file),
            rules=SandboxRules(
                options.kind,
                options.options,
                tuple(options.image),
                {here: inside for here, _, inside in mounts},
            ),
            certificate=options.certificate,
            private_key=options.private_key,
            plain=options.plain,
            sandboxes=options.sandboxes,
            boots=options.boots,
            lease_seconds=options.lease,
        )
    )
    return 0

"""`mrl` with workers from the tests' fork servers, pretended nodes and faults on request."""

import os
import sys

from benchmarks.soak import faults
from mrl.cli import main
from tests.forks import servers
from tests.support import pretended_nodes

if __name__ == "__main__":
    nodes = [int(node) for node in os.environ.pop(pretended_nodes.VARIABLE, "").split(",") if node]
    with (
        servers.starting_workers(os.environ.pop(servers.VARIABLE)),
        pretended_nodes.slots_on(nodes),
        faults.injected(faults.requested()),
    ):
        sys.exit(main())

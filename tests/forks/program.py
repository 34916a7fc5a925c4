"""`mrl` with workers that the tests' fork servers start; the rest of it is a user's."""

import os
import sys

from mrl.cli import main
from tests.forks import servers

if __name__ == "__main__":
    with servers.starting_workers(os.environ.pop(servers.VARIABLE)):
        sys.exit(main())

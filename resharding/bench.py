"""The weight sync's benchmark as it is started from a checkout: `torchrun ... -m resharding.bench`."""

import sys

from benchmarks.resharding.__main__ import main

if __name__ == "__main__":
    sys.exit(main())

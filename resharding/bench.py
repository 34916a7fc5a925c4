"""The door of the weight sync's benchmark: `torchrun ... -m resharding.bench` from a checkout."""

from benchmarks.resharding.__main__ import main

if __name__ == "__main__":
    main()

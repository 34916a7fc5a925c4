"""Entry point of `python -m mrl.cli`."""

from mrl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`mrl convert`: write a model folder from a GGUF file, or a mixture of experts from a dense model."""

from __future__ import annotations

import argparse
from pathlib import Path

from mrl.cli.common import add_command, print_result


def add_convert_to(commands) -> None:
    """Add the command and its arguments."""
    text = "convert a GGUF file to a Hugging Face folder, or a dense model to a mixture of experts"
    convert = add_command(commands, "convert", text)
    convert.add_argument("source", help="a .gguf file, or a dense folder (Llama or Qwen3; needs --experts)")
    convert.add_argument("--out", required=True, help="new folder to write")
    convert.add_argument(
        "--experts", type=int, help="make a mixture of this many experts per layer; default: a dense model"
    )
    convert.add_argument(
        "--per-token", type=int, default=2, help="active experts per token (top-k); 2 by default"
    )
    text = "noise added to expert weights, in standard deviations of the tensor; 0 by default"
    convert.add_argument("--noise", type=float, default=0.0, help=text)
    text = "standard deviation of the router's weights; 0.02 by default"
    convert.add_argument("--router-std", type=float, default=0.02, help=text)
    convert.add_argument("--seed", type=int, default=0, help="seed of router and noise; 0 by default")
    convert.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    from mrl.prepare.convert_model import Upcycling, convert_model

    upcycling = (
        None
        if options.experts is None
        else Upcycling(options.experts, options.per_token, options.noise, options.router_std, options.seed)
    )
    count = convert_model(Path(options.source), Path(options.out), upcycling)
    return print_result(f"wrote {options.out}: {count / 1e6:,.1f} million parameters")

"""Commands that take a configuration or make files: arguments, and the import of their work when called."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from mrl.cli.common import CONFIG_HELP, add_command, command_config, config_command, print_result

log = logging.getLogger(__name__)


def add_training_to(commands) -> None:
    """Add the commands that train or prepare data."""
    _train_command(commands)
    config_command(
        commands,
        "tune",
        _tune,
        "SFT, DPO and reward models: train on demonstrations or preferences, write a model folder",
    )
    _make_command(commands)
    _data_command(commands)


def add_inspection_to(commands) -> None:
    """Add the commands that inspect or evaluate a configuration."""
    _eval_command(commands)
    _rewards_command(commands)
    _plan_command(commands)
    _settings_command(commands)


def _train_command(commands) -> None:
    train = config_command(
        commands, "train", _train, "start a training run, or resume it from its last checkpoint"
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check the configuration, its files, model and rewards, print all settings, and exit",
    )


def _train(options: argparse.Namespace) -> int:
    config = command_config(options)
    if options.dry_run:
        from mrl.launch.commands.check import dry_run

        settings, warnings = dry_run(config)
        print(settings, end="", flush=True)
        for warning in warnings:
            log.warning(warning)
        return 0
    from mrl.launch.commands.train import train
    from mrl.observe.streams import survive_full_disks

    survive_full_disks()
    return train(config).exit_code


def _tune(options: argparse.Namespace) -> int:
    from mrl.launch.commands.tune import run_ranks

    return run_ranks(options.config)


def _make_command(commands) -> None:
    make = add_command(commands, "make", "make task files, preference pairs, or a tokenizer")
    make.add_argument(
        "what",
        choices=["arithmetic", "calculator", "harbor", "problems", "preferences", "tokenizer"],
        help="arithmetic: sums for `make quickstart`; calculator: products, for a model with a tool; "
        "harbor: rows and files of the Harbor tasks in the folders of --from; "
        "problems: arithmetic in words, for a pretrained model; preferences: pairs of a better and a worse "
        "response to rows of a configuration; tokenizer: one trained on the files of --from",
    )
    make.add_argument("config", nargs="*", help=f"preferences: {CONFIG_HELP}")
    make.add_argument("--out", required=True, help="folder to write to")
    make.add_argument("--largest", type=int, default=99, help="arithmetic: largest summand; 99 by default")
    make.add_argument(
        "--pairs",
        type=int,
        help="arithmetic: number of pairs of a correct and an incorrect answer; by default one per training "
        "row, at most 2000",
    )
    make.add_argument(
        "--samples",
        type=int,
        default=0,
        help="preferences: pair the best and the worst of this many responses that model.path samples per "
        "row; 0 by default: pair correct responses with corrupted ones, without an engine",
    )
    make.add_argument(
        "--rows", type=int, help="preferences: use the first ROWS rows of each data entry; all by default"
    )
    make.add_argument(
        "--from",
        dest="files",
        nargs="*",
        default=[],
        help="tokenizer: train on these files (jsonl or parquet); harbor: folders of tasks",
    )
    make.add_argument(
        "--builder",
        choices=["docker", "podman"],
        default="docker",
        help="harbor: command line that builds the images and runs them as sandboxes; docker by default",
    )
    make.add_argument(
        "--unpack", action="store_true", help="harbor: make folders of the images, for bubblewrap"
    )
    make.add_argument(
        "--unchecked",
        action="store_true",
        help="harbor: do not try the tasks' solutions; also take tasks without one that need no internet",
    )
    make.add_argument(
        "--vocab-size", type=int, default=2048, help="tokenizer: vocabulary size; 2048 by default"
    )
    make.set_defaults(run=_make)


def _make(options: argparse.Namespace) -> int:
    if options.what == "preferences":
        return _pairs(options)
    from mrl.prepare import arithmetic_rows, calculator_rows, problem_rows, tokenizer

    out, files, size = options.out, options.files, options.vocab_size
    makers = {
        "arithmetic": lambda: arithmetic_rows.write_arithmetic(
            out, largest=options.largest, num_pairs=options.pairs
        ),
        "calculator": lambda: calculator_rows.write_calculator(out),
        "harbor": lambda: _harbor(options),
        "problems": lambda: problem_rows.write_problems(out),
        "tokenizer": lambda: f"{out}: {tokenizer.write_bpe(files, out, vocab_size=size)} tokens",
    }
    return print_result(f"wrote {makers[options.what]()}")


def _harbor(options: argparse.Namespace) -> str:
    from mrl.prepare.harbor_tasks import write_harbor

    return write_harbor(
        options.files,
        options.out,
        builder=options.builder,
        unpack=options.unpack,
        unchecked=options.unchecked,
    )


def _pairs(options: argparse.Namespace) -> int:
    from mrl.rollout.vllm_environment import quiet

    quiet()
    from mrl.launch.commands.preferences import PreferenceOptions, make_preferences

    preferences = PreferenceOptions(Path(options.out), samples=options.samples, rows=options.rows)
    return print_result(make_preferences(command_config(options), preferences))


def _data_command(commands) -> None:
    text = "show rows as the policy sees them, the rows' lengths, and which rows are left out and why"
    data = config_command(commands, "data", _data, text)
    data.add_argument("--rows", type=int, default=2, help="rows to show per file; 2 by default")


def _data(options: argparse.Namespace) -> int:
    from mrl.launch.commands.data import preview

    return print_result(preview(command_config(options), rows=max(0, options.rows)).text())


def _eval_command(commands) -> None:
    evaluate = config_command(
        commands,
        "eval",
        _eval,
        "evaluate model.path on data.validation: mean reward of greedy responses, avg@k and pass@k",
    )
    evaluate.add_argument("--out", help="new or empty folder for samples.jsonl, rates.jsonl and summary.json")
    evaluate.add_argument(
        "--train",
        action="store_true",
        help="evaluate on data.train instead; data.difficulty.file can read the resulting rates.jsonl",
    )


def _eval(options: argparse.Namespace) -> int:
    from mrl.rollout.vllm_environment import quiet

    quiet()
    from mrl.launch.commands.evaluate import evaluate

    for name, value in evaluate(command_config(options), out=options.out, train=options.train).items():
        print(f"{name} {value:.4f}")
    return 0


def _rewards_command(commands) -> None:
    text = "try the configured rewards on one response, on good and bad responses, or on labelled responses"
    kinds = add_command(commands, "rewards", text).add_subparsers(required=True, metavar="WHAT")
    show = config_command(kinds, "show", _rewards, "print the verdict on one response to one row of the data")
    show.add_argument(
        "--row",
        required=True,
        help="FILE:LINE, or a row number N, counted from 1: row N of the first file with at least N rows "
        "(files of data.train, then of data.validation)",
    )
    show.add_argument(
        "--response",
        help="text, a file with it, or - for standard input; by default the row's ground truth in \\boxed{}",
    )
    show.add_argument("--explain", action="store_true", help="print each verifier's input and verdict")
    tried = config_command(
        kinds, "try", _rewards_try, "score good, bad, empty, truncated and adversarial responses before a run"
    )
    tried.add_argument(
        "--rows", type=int, default=20, help="use the first ROWS rows of each domain; 20 by default"
    )
    tried.add_argument(
        "--right", help='correct responses: a column of the rows, or a file of rows {"row", "response"}'
    )
    check = config_command(
        kinds, "check", _rewards_check, "compare rewards with labels of responses, and try attacks"
    )
    check.add_argument(
        "--gold",
        required=True,
        help="file of rows with prompt, response, right (true or false) and, if needed, answer, domain, tag",
    )
    check.add_argument(
        "--threshold", type=float, default=0.5, help="a reward above this means correct; 0.5 by default"
    )
    check.add_argument(
        "--min-agreement",
        type=float,
        default=0.0,
        help="exit with code 1 if the accuracy is below this; 0.0 by default",
    )
    text = 'add the attacks of this file, rows {"id", "text"}; may be repeated'
    check.add_argument("--attacks", action="append", default=[], metavar="FILE", help=text)
    text = "try attacks on this many incorrect responses that score at most --threshold; 10 by default"
    check.add_argument("--attacked-rows", type=int, default=10, help=text)
    for command in (tried, check):
        command.add_argument(
            "--deadline",
            type=float,
            default=3600.0,
            help="end the command after so many seconds; 3600 by default",
        )


def _rewards(options: argparse.Namespace) -> int:
    from mrl.launch.commands.engines import with_engines
    from mrl.launch.commands.rewards import verify_row

    with with_engines(command_config(options)) as config:
        text = verify_row(config, row=options.row, response=options.response, every_verifier=options.explain)
    return print_result(text)


def _rewards_try(options: argparse.Namespace) -> int:
    from mrl.launch.commands.engines import with_engines
    from mrl.launch.commands.rewards_try import try_rewards

    with with_engines(command_config(options)) as config:
        report, is_good = try_rewards(
            config, num_rows=options.rows, deadline_seconds=options.deadline, right=options.right
        )
    return print_result(report) or int(not is_good)


def _rewards_check(options: argparse.Namespace) -> int:
    from mrl.launch.commands.engines import with_engines
    from mrl.launch.commands.rewards_check import RewardCheckOptions, check_agreement

    check_options = RewardCheckOptions(
        gold=Path(options.gold),
        threshold=options.threshold,
        min_agreement=options.min_agreement,
        attacks=tuple(Path(file) for file in options.attacks),
        attacked_rows=options.attacked_rows,
        deadline_seconds=options.deadline,
    )
    with with_engines(command_config(options)) as config:
        report, is_good = check_agreement(config, check_options)
    return print_result(report) or int(not is_good)


def _plan_command(commands) -> None:
    text = "estimate memory, traffic and time of a run; needs no GPU"
    plan = config_command(commands, "plan", _plan, text)
    plan.add_argument(
        "--hardware",
        help="name in configs/hardware, or a file; default: on a machine without GPUs, this machine; "
        "on one with GPUs, 8x80gb, whatever its GPUs are",
    )
    plan.add_argument(
        "--network-gbit",
        type=float,
        help="bandwidth of each slot (GPU) to other nodes, in Gbit/s; default: that of the hardware",
    )
    plan.add_argument(
        "--mean-response",
        type=float,
        help="mean tokens of a response; default: half of rollout.max_response_tokens",
    )


def _plan(options: argparse.Namespace) -> int:
    from mrl.capacity.hardware import load_hardware, with_mean_response, with_network
    from mrl.capacity.report import capacity_report
    from mrl.launch.commands.this_machine import hardware_here

    config = command_config(options)
    hardware = load_hardware(options.hardware) if options.hardware else hardware_here(config)
    if options.network_gbit is not None:
        hardware = with_network(hardware, options.network_gbit)
    if options.mean_response is not None:
        longest = config.rollout.max_response_tokens
        hardware = with_mean_response(hardware, options.mean_response, longest)
    report = capacity_report(config, hardware)
    return print_result(report.table()) or int(not report.fits)


def _settings_command(commands) -> None:
    text = "list all settings, or those below a path, each with one sentence"
    settings = add_command(commands, "settings", text)
    settings.add_argument("path", nargs="?", default="", help="for example reward, or rollout.tp")
    settings.set_defaults(run=_settings)


def _settings(options: argparse.Namespace) -> int:
    from mrl.config.describe import describe

    return print_result(describe(options.path))

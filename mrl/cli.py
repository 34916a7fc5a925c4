"""The `mrl` command.

Owns arguments and exit codes; each command's work is in the package it belongs to, imported when called.
Exit codes: 0 done, 2 bad input (configuration, data), 1 failed while running, 3 stopped by a rule of
loop.stop, 99 stopped to be queued again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from mrl.errors import ConfigError, DataError, MrlError

CONFIG_HELP = "CONFIG.yaml ... a.b.c=value ... (files are merged left to right, then the values)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; errors of ours become one message and an exit code."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.getcwd() not in sys.path:
        sys.path.append(
            os.getcwd()
        )  # users' own modules lie here: where `python -m` and Ray's workers look too
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    options = _parse(arguments)
    try:
        return options.run(options)
    except (ConfigError, DataError) as error:
        print(f"mrl: {error}", file=sys.stderr)
        return 2
    except MrlError as error:
        print(f"mrl: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("mrl: interrupted", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses arguments; files and overrides may also stand behind options, which argparse alone refuses."""
    from mrl.config.other_names import RENAMED_COMMANDS

    parser = _parser()
    command = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    if command in RENAMED_COMMANDS:
        parser.error(f"{command} is renamed to {RENAMED_COMMANDS[command]}")
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "config") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.config = [*options.config, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrl",
        description="Reinforcement learning for mixture-of-experts language models: Megatron trains and "
        "vLLM generates.",
        epilog="`mrl settings` prints every setting with one sentence; README.md has a first run.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = _config_command(commands, "train", _train, "train, or resume, a run")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration, check all that it names, stop",
    )
    _config_command(commands, "tune", _tune, "tune on demonstrations or preferences; gives a model folder")
    make = commands.add_parser("make", help="make task files or a tokenizer")
    make.add_argument("what", choices=["arithmetic", "calculator", "domains", "tokenizer"])
    make.add_argument("--out", required=True, help="folder to write to")
    make.add_argument("--largest", type=int, default=99, help="arithmetic: largest summand")
    make.add_argument("--from", dest="files", nargs="*", default=[], help="tokenizer: jsonl or parquet files")
    make.add_argument("--vocab-size", type=int, default=2048, help="tokenizer: size of the vocabulary")
    make.set_defaults(run=_make)
    _data_command(commands)
    _report_command(commands)
    _audit_command(commands)
    _watch_command(commands)
    _replay_command(commands)
    _diagnose_command(commands)
    samples = commands.add_parser("samples", help="samples of a run as text, episodes turn by turn")
    samples.add_argument("path", help="run folder, or a file of samples")
    samples.add_argument("--step", type=int, help="of one step alone")
    samples.add_argument("--kind", help="train, validation or sampled alone")
    samples.add_argument("--limit", type=int, default=10, help="most samples")
    samples.set_defaults(run=_samples)
    export = commands.add_parser("export", help="a run's checkpoint as a Hugging Face folder")
    export.add_argument("folder", help="run folder")
    where = export.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", help="folder to write to")
    where.add_argument("--dry-run", action="store_true", help="check the checkpoint and count, write nothing")
    export.add_argument("--step", type=int, help="step of the checkpoint; the newest valid one by default")
    export.add_argument(
        "--max-shard-bytes", type=int, help="largest file; the run's export.max_shard_bytes by default"
    )
    export.add_argument(
        "--adapter",
        action="store_true",
        help="what training.lora trained alone, as a folder of the PEFT library",
    )
    export.set_defaults(run=_export)
    evaluate = _config_command(
        commands, "eval", _eval, "accuracy, avg@k and pass@k of model.path on data.validation"
    )
    evaluate.add_argument("--out", help="new folder for samples.jsonl and summary.json")
    _rewards_commands(commands)
    _plan_command(commands)
    bench = commands.add_parser("bench", help="a step against its floor, or schedules against each other")
    _bench_commands(bench.add_subparsers(required=True, metavar="WHAT"))
    settings = commands.add_parser("settings", help="all settings, or those below a path, one sentence each")
    settings.add_argument("path", nargs="?", default="", help="for instance reward, or rollout.tp")
    settings.set_defaults(run=_settings)
    return parser


def _data_command(commands) -> None:
    data = _config_command(
        commands, "data", _data, "rows as the policy sees them, their lengths, what is left out and why"
    )
    data.add_argument("--rows", type=int, default=2, help="rows shown of each file; 2 by default")
    data.add_argument("--json", action="store_true", help="for programs")


def _plan_command(commands) -> None:
    text = "memory, traffic and time of a configuration, without any GPU"
    plan = _config_command(commands, "plan", _plan, text, count="*")
    plan.add_argument("--hardware", default="8x80gb", help="name in configs/hardware, or a file")
    plan.add_argument("--json", action="store_true", help="for programs")
    stream = plan.add_argument_group(
        "streams", "simulated: step time, who waits for whom, ages, and the best split and max_age"
    )
    stream.add_argument(
        "--stream", action="store_true", help="simulate schedules on the configuration's slots"
    )
    stream.add_argument(
        "--from",
        dest="run_folder",
        metavar="RUN",
        help="take times and lengths from this on_policy run, and its configuration; CONFIG then changes settings of it",
    )
    stream.add_argument("--max-age", type=int, default=4, help="largest stream.max_age that is tried")
    stream.add_argument("--mean", type=float, help="mean tokens of a response; by the hardware's file else")
    stream.add_argument("--sigma", type=float, default=0.9, help="deviation of the logarithm of the lengths")
    stream.add_argument(
        "--filtered", type=float, default=0.0, help="share of the groups that are filtered away"
    )
    stream.add_argument("--every-choice", action="store_true", help="simulate all choices beside the search")


def _report_command(commands) -> None:
    text = "runs as one HTML page that opens from disk, and their curves as text"
    report = commands.add_parser("report", help=text, description=text)
    report.add_argument("folder", nargs="+", help="run folders, one or several to compare")
    report.add_argument("--out", help="file to write; report.html in the first folder by default")
    report.add_argument("--text", action="store_true", help="curves as text alone, write nothing")
    report.add_argument("--steps", help="FIRST-LAST: show samples of these steps alone")
    report.add_argument(
        "--megabytes", type=float, default=16.0, help="samples of all runs in the page; 16 by default"
    )
    report.set_defaults(run=_report)


def _audit_command(commands) -> None:
    text = "prove from a run's folder that each prompt was trained once, filtered once or given up once"
    audit = commands.add_parser("audit", help=text, description=f"{text}; 1 where that is not so")
    audit.add_argument("folder", help="run folder")
    audit.set_defaults(run=_audit)


def _watch_command(commands) -> None:
    text = "the report's page of runs while they are written, for a browser of this machine"
    watch = commands.add_parser("watch", help=text, description=text)
    watch.add_argument("folder", nargs="+", help="run folders, or folders of runs")
    watch.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; this machine alone by default"
    )
    watch.add_argument("--port", type=int, default=8400, help="8400 by default; 0 is any that is free")
    watch.set_defaults(run=_watch)


def _replay_command(commands) -> None:
    text = "executes the recorded schedule of a stream again and compares all tokens and weights"
    replay = commands.add_parser("replay", help=text, description=text)
    replay.add_argument("folder", help="run folder")
    replay.add_argument("--out", help="new folder; the run's with -replay behind its name by default")
    replay.add_argument(
        "--until", type=int, metavar="STEP", help="last step; the record's last whole one by default"
    )
    replay.add_argument("--attempt", type=int, help="number of the run's start; its last one by default")
    replay.add_argument(
        "--judge-again", action="store_true", help="ask the reward workers again and name other rewards"
    )
    replay.add_argument("--any-code", action="store_true", help="also a record of other source code")
    replay.set_defaults(run=_replay)


def _diagnose_command(commands) -> None:
    text = "what is wrong with a run, since when, and what to change"
    diagnose = commands.add_parser("diagnose", help=text, description=text)
    diagnose.add_argument("folder", help="run folder; diagnosis.md is written there")
    diagnose.add_argument("--json", action="store_true", help="for programs; writes nothing")
    diagnose.set_defaults(run=_diagnose)


def _rewards_commands(commands) -> None:
    text = (
        "the rewards of a configuration: of one response, of responses of known worth, against known verdicts"
    )
    kinds = commands.add_parser("rewards", help=text, description=text).add_subparsers(
        required=True, metavar="WHAT"
    )
    show = _config_command(kinds, "show", _rewards, "the verdict on one response to one row of the data")
    show.add_argument("--row", required=True, help="its number in its file, from 1, or file:line")
    show.add_argument(
        "--response", help="text, a file, or - for standard input; the row's ground truth in a box by default"
    )
    show.add_argument("--explain", action="store_true", help="print what each stage read and said")
    tried = _config_command(
        kinds,
        "try",
        _rewards_try,
        "what empty, right, wrong, cut off and attacking responses get, before a run",
    )
    tried.add_argument("--rows", type=int, default=20, help="first rows of each domain; 20 by default")
    check = _config_command(
        kinds,
        "check",
        _rewards_check,
        "agreement with responses that are known to be right or wrong; attacks",
    )
    check.add_argument("--gold", required=True, help='rows {"prompt", "response", "right", "answer", "tag"}')
    check.add_argument(
        "--threshold", type=float, default=0.5, help="a reward above it says right; 0.5 by default"
    )
    check.add_argument(
        "--min-agreement", type=float, default=0.0, help="least accuracy; below it the exit code is 1"
    )
    check.add_argument("--repeat", action="store_true", help="ask twice, count verdicts that differ")
    check.add_argument(
        "--attacks", nargs="*", default=[], help='files of further attacks, rows {"id", "text"}'
    )
    check.add_argument(
        "--attacked-rows", type=int, default=10, help="wrong responses that attack; 10 by default"
    )
    for command in (tried, check):
        command.add_argument(
            "--deadline", type=float, default=3600.0, help="seconds for all of it; 3600 by default"
        )


def _bench_commands(commands) -> None:
    step = _config_command(commands, "step", _bench_step, "a step of the loop against its floor")
    step.add_argument("--steps", type=int, default=5, help="steps measured after one warm-up")
    stream = _config_command(
        commands, "stream", _bench_stream, "schedules against each other, with responses of fixed lengths"
    )
    stream.add_argument(
        "--schedules",
        default="on_policy,stream:max_age=2",
        help="with commas between them; settings of `stream` behind colons; the first one is compared with",
    )
    stream.add_argument("--steps", type=int, default=15, help="steps measured of each schedule, in two runs")
    stream.add_argument("--warm-up", type=int, default=3, help="steps of each run before them")
    stream.add_argument("--sigma", type=float, default=0.9, help="deviation of the logarithm of the lengths")
    stream.add_argument(
        "--mean", type=float, help="mean tokens of a response; a quarter of the longest by default"
    )
    for command in (step, stream):
        command.add_argument("--json", action="store_true", help="for programs")


def _config_command(commands, name: str, run, text: str, *, count: str = "+") -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("config", nargs=count, help=CONFIG_HELP)
    command.set_defaults(run=run)
    return command


def _load(options: argparse.Namespace, *overrides: str):
    from mrl.config.load import load_config

    return load_config(*options.config, *overrides)


def _answer(text: str) -> int:
    """Prints what a command was asked for; a reader that leaves early (`mrl settings | head`) has what it wanted."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _train(options: argparse.Namespace) -> int:
    config = _load(options)
    if options.dry_run:
        from mrl.config.load import dump
        from mrl.launch.commands.check import dry_run

        print(dump(config), end="", flush=True)
        dry_run(config)
        return 0
    from mrl.launch.commands.train import train
    from mrl.observe.streams import survive_full_disks

    survive_full_disks()
    return train(config).exit_code


def _tune(options: argparse.Namespace) -> int:
    from mrl.launch.commands.tune import run_ranks

    return run_ranks(options.config)


def _make(options: argparse.Namespace) -> int:
    if options.what == "arithmetic":
        from mrl.prepare import arithmetic

        print(f"wrote {arithmetic.write(options.out, largest=options.largest)}")
        return 0
    if options.what == "calculator":
        from mrl.prepare import calculator

        print(f"wrote {calculator.write(options.out)}")
        return 0
    if options.what == "domains":
        from mrl.prepare import domains

        print(f"wrote {domains.write(options.out)}")
        return 0
    from mrl.prepare import tokenizer

    size = tokenizer.write_bpe(options.files, options.out, vocab_size=options.vocab_size)
    print(f"wrote {options.out}: {size} tokens")
    return 0


def _data(options: argparse.Namespace) -> int:
    import json

    from mrl.launch.commands.data import preview

    found = preview(_load(options), rows=max(0, options.rows))
    return _answer(json.dumps(found.tree, indent=1) if options.json else found.text())


def _report(options: argparse.Namespace) -> int:
    from pathlib import Path

    from mrl.report.page import write_report
    from mrl.report.text import text

    folders = [Path(folder) for folder in options.folder]
    said = [text(folder) for folder in folders]
    if not options.text:
        out = Path(options.out or folders[0] / "report.html")
        write_report(folders, out, megabytes=options.megabytes, steps=_steps(options.steps))
        said.append(f"wrote {out}; it opens in a browser, from disk")
    return _answer("\n".join(said))


def _audit(options: argparse.Namespace) -> int:
    from pathlib import Path

    from mrl.report.audit import audit, text

    found = audit(Path(options.folder))
    return _answer(text(found)) or int(not found.holds)


def _watch(options: argparse.Namespace) -> int:
    from pathlib import Path

    from mrl.watch.serve import serve

    serve([Path(folder) for folder in options.folder], host=options.host, port=options.port)
    return 0


def _diagnose(options: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from mrl.diagnosis import page
    from mrl.diagnosis.folder import diagnose_folder

    folder = Path(options.folder)
    diagnosis, notes = diagnose_folder(folder)
    if options.json:
        return _answer(json.dumps(page.tree(diagnosis, notes), indent=1))
    name, out = folder.resolve().name, folder / "diagnosis.md"
    out.write_text(page.markdown(name, diagnosis, notes), encoding="utf-8")
    return _answer(f"{page.screen(name, diagnosis, notes)}\nwrote {out}")


def _samples(options: argparse.Namespace) -> int:
    from pathlib import Path

    from mrl.report.transcripts import samples_text

    path = Path(options.path)
    return _answer(samples_text(path, step=options.step, kind=options.kind, limit=options.limit))


def _steps(words: str | None) -> tuple[int, int] | None:
    """FIRST-LAST, or one step."""
    if words is None:
        return None
    first, _, last = words.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise ConfigError(f"--steps {words}: FIRST-LAST is asked for, as in --steps 100-120")
    return int(first), int(last or first)


def _export(options: argparse.Namespace) -> int:
    from mrl.launch.commands.export import export_run

    size = options.max_shard_bytes
    text = export_run(
        options.folder, options.out, step=options.step, max_shard_bytes=size, adapter=options.adapter
    )
    print(text)
    return 0


def _eval(options: argparse.Namespace) -> int:
    from mrl.rollout.environment import quiet

    quiet()
    from mrl.launch.commands.evaluate import evaluate

    for name, value in evaluate(_load(options), out=options.out).items():
        print(f"{name} {value:.4f}")
    return 0


def _rewards(options: argparse.Namespace) -> int:
    from mrl.launch.commands.rewards import verify_row

    said = verify_row(_load(options), row=options.row, response=options.response, every_stage=options.explain)
    return _answer(said)


def _rewards_try(options: argparse.Namespace) -> int:
    from mrl.launch.commands.rewards_try import try_rewards

    said, is_good = try_rewards(_load(options), num_rows=options.rows, deadline_seconds=options.deadline)
    return _answer(said) or int(not is_good)


def _rewards_check(options: argparse.Namespace) -> int:
    from pathlib import Path

    from mrl.launch.commands.rewards_check import Options, check_agreement

    asked = Options(
        gold=Path(options.gold),
        threshold=options.threshold,
        min_agreement=options.min_agreement,
        repeat=options.repeat,
        attacks=tuple(Path(file) for file in options.attacks),
        attacked_rows=options.attacked_rows,
        deadline_seconds=options.deadline,
    )
    said, is_good = check_agreement(_load(options), asked)
    return _answer(said) or int(not is_good)


def _plan(options: argparse.Namespace) -> int:
    import json

    from mrl.capacity.hardware import load_hardware

    if options.run_folder and options.stream:
        options.config = [f"{options.run_folder}/config.yaml", *options.config]
    if not options.config:
        raise ConfigError("mrl plan: CONFIG.yaml is needed, or --stream --from RUN")
    if options.stream:
        return _plan_stream(options)
    from mrl.capacity.report import capacity_report

    report = capacity_report(_load(options), load_hardware(options.hardware))
    return _answer(json.dumps(report.tree, indent=1) if options.json else report.table())


def _plan_stream(options: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from mrl.capacity.hardware import load_hardware
    from mrl.simulation.report import planned, planned_from

    shown = {"most_age": options.max_age, "every_choice": options.every_choice}
    if options.run_folder:
        plan = planned_from(_load(options), Path(options.run_folder), **shown)
    else:
        lengths = {"mean": options.mean, "sigma": options.sigma, "filtered": options.filtered}
        plan = planned(_load(options), load_hardware(options.hardware), **lengths, **shown)
    return _answer(json.dumps(plan.tree, indent=1) if options.json else plan.table())


def _replay(options: argparse.Namespace) -> int:
    from pathlib import Path

    from mrl.launch.commands.replay import Asked, replay
    from mrl.observe.streams import survive_full_disks

    survive_full_disks()
    run = Path(options.folder)
    out = Path(options.out) if options.out else run.resolve().with_name(f"{run.resolve().name}-replay")
    asked = Asked(run, out, options.until, options.attempt, options.judge_again, options.any_code)
    return _answer(replay(asked))


def _bench_step(options: argparse.Namespace) -> int:
    from mrl.launch.commands.bench_step import bench_step, table

    return _figures(bench_step(_load(options), num_steps=options.steps), table, options)


def _bench_stream(options: argparse.Namespace) -> int:
    from mrl.launch.commands.bench_stream import bench_stream, settings_of, table

    names = options.schedules.split(",")
    if len(set(names)) < len(names):
        raise ConfigError(f"--schedules {options.schedules}: a schedule stands there twice")
    configs = {name: _load(options, *settings_of(name)) for name in names}
    figures = bench_stream(
        configs, num_steps=options.steps, warm_up=options.warm_up, sigma=options.sigma, mean=options.mean
    )
    return _figures(figures, table, options)


def _figures(figures, table, options: argparse.Namespace) -> int:
    import json

    return _answer(json.dumps(figures, indent=1) if options.json else table(figures))


def _settings(options: argparse.Namespace) -> int:
    from mrl.config.describe import describe

    return _answer(describe(options.path))


if __name__ == "__main__":
    raise SystemExit(main())

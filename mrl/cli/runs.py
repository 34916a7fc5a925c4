"""Commands that take a run folder: their arguments, and the import of their work when called."""

from __future__ import annotations

import argparse
from pathlib import Path

from mrl.cli.common import add_command, print_result
from mrl.errors import ConfigError


def add_to(commands) -> None:
    """Add them in the order of `mrl --help`."""
    _report_command(commands)
    _audit_command(commands)
    _diagnose_command(commands)
    _samples_command(commands)
    _export_command(commands)


def _report_command(commands) -> None:
    text = "write one HTML file that shows one or more runs, and print their curves"
    report = add_command(commands, "report", text)
    report.add_argument("folder", nargs="+", help="run folder, or several to compare")
    report.add_argument("--out", help="file to write; report.html in the first folder by default")
    report.add_argument("--text", action="store_true", help="only print the curves; write no HTML file")
    report.add_argument(
        "--steps", help="show only samples of these steps: FIRST-LAST, or one; curves show all steps"
    )
    report.add_argument(
        "--megabytes",
        type=float,
        default=16.0,
        help="maximum megabytes of samples on the page; 16 by default",
    )
    report.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from mrl.report.page import write_report
    from mrl.report.run_data import run_folder
    from mrl.report.text import run_text

    folders = [run_folder(Path(folder)) for folder in options.folder]
    texts = [run_text(folder) for folder in folders]
    if not options.text:
        out = Path(options.out or folders[0] / "report.html")
        write_report(folders, out, megabytes=options.megabytes, steps=_steps(options.steps))
        texts.append(f"wrote {out}; open it in a browser")
    return print_result("\n".join(texts))


def _steps(words: str | None) -> tuple[int, int] | None:
    """Parse FIRST-LAST, or one step."""
    if words is None:
        return None
    first, _, last = words.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise ConfigError(f"--steps {words} must look like FIRST-LAST, e.g. 100-120")
    return int(first), int(last or first)


def _audit_command(commands) -> None:
    text = "check that each prompt of a run has exactly one outcome: trained on, filtered out or given up"
    audit = add_command(commands, "audit", text)
    audit.add_argument("folder", help="run folder")
    audit.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    from mrl.report.audit import audit, audit_text

    result = audit(Path(options.folder))
    return print_result(audit_text(result)) or int(not result.passes)


def _diagnose_command(commands) -> None:
    text = "report what is wrong with a run, from which step on, and what to change"
    diagnose = add_command(commands, "diagnose", text)
    diagnose.add_argument("folder", help="run folder; diagnosis.md is written there")
    diagnose.set_defaults(run=_diagnose)


def _diagnose(options: argparse.Namespace) -> int:
    from mrl.diagnosis.diagnosed_folder import diagnose_folder
    from mrl.diagnosis.diagnosis_page import markdown
    from mrl.files import replace_text
    from mrl.report.run_data import run_folder

    folder = run_folder(Path(options.folder))
    diagnosis, notes = diagnose_folder(folder)
    page, out = markdown(folder.resolve().name, diagnosis, notes), folder / "diagnosis.md"
    replace_text(out, page)
    return print_result(f"{page}\nwrote {out}")


def _samples_command(commands) -> None:
    samples = add_command(commands, "samples", "print samples of a run as text, and episodes turn by turn")
    samples.add_argument("path", help="run folder, or a samples.jsonl file")
    samples.add_argument("--step", type=int, help="only samples of this step")
    samples.add_argument(
        "--kind", help="only samples of this kind: train, validation (greedy), sampled (avg@k of mrl eval)"
    )
    samples.add_argument("--limit", type=int, default=10, help="print at most this many; 10 by default")
    samples.set_defaults(run=_samples)


def _samples(options: argparse.Namespace) -> int:
    from mrl.report.samples_text import samples_text

    path = Path(options.path)
    return print_result(samples_text(path, step=options.step, kind=options.kind, limit=options.limit))


def _export_command(commands) -> None:
    export = add_command(commands, "export", "export a run's checkpoint as a Hugging Face folder")
    export.add_argument("folder", help="run folder")
    where = export.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", help="folder to write to")
    where.add_argument(
        "--dry-run", action="store_true", help="only check the checkpoint and print the folder's size"
    )
    export.add_argument("--step", type=int, help="step of the checkpoint; the newest valid one by default")
    export.add_argument(
        "--max-shard-bytes", type=int, help="maximum bytes of a weights file; 5 GB by default"
    )
    export.add_argument(
        "--adapter", action="store_true", help="export only the LoRA adapters (training.lora), in PEFT format"
    )
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    from mrl.launch.commands.export import export_run

    size = options.max_shard_bytes
    text = export_run(
        options.folder, options.out, step=options.step, max_shard_bytes=size, adapter=options.adapter
    )
    print(text)
    return 0

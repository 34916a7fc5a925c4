"""A recorded step: what torch's profiler saw lies in the run's folder, inside the phases it happened in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from mrl.training.profiler import Profiler


def test_a_record_has_the_phases_and_what_ran_in_them(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "profile", rank=3, device=torch.device("cpu"), memory=True)
    for step in (2, 5):
        profiler.start(step)
        profiler.enter("update")
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        profiler.leave()
        profiler.enter("sync")  # ended by stop()
        profiler.stop()
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert files == ["step-2-rank-3.json.gz", "step-5-rank-3.json.gz"]
    events = json.loads(gzip.decompress((tmp_path / "profile" / files[1]).read_bytes()))["traceEvents"]
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events if "dur" in event}
    start, end = spans["mrl/update"]
    product = spans["aten::mm"]
    assert start <= product[0] <= product[1] <= end <= spans["mrl/sync"][0]

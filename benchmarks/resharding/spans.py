"""What the spans of a weight sync say: how far packing is hidden behind travel, and a trace for a browser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mrl.resharding.transfer.timeline import Span


def packed_meanwhile(spans: Iterable[Span]) -> float:
    """Share of a rank's packing, the first window's aside, in which the window before was on its way; 1 where there is none.

    >>> packed_meanwhile([Span("travel", 0, 1.0, 4.0), Span("pack", 1, 3.0, 5.0)])
    0.5
    """
    spans = list(spans)
    travels = {span.window: span for span in spans if span.what == "travel"}
    packs = [span for span in spans if span.what == "pack" and span.window]
    hidden = 0.0
    for pack in packs:
        if (before := travels.get(pack.window - 1)) is not None:
            hidden += max(0.0, min(pack.end, before.end) - max(pack.begin, before.begin))
    total = sum(pack.end - pack.begin for pack in packs)
    return hidden / total if total else 1.0


def chrome(processes: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """The spans of the named processes of one machine in the format of chrome://tracing and Perfetto ("Trace Event Format"):
    complete events, in microseconds since the first."""
    first = min((span.begin for spans in processes.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for number, (name, spans) in enumerate(processes.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        events += [
            {
                "ph": "X",
                "name": f"{span.what} {span.window}",
                "cat": span.what,
                "pid": number,
                "tid": span.what,
                "ts": 1e6 * (span.begin - first),
                "dur": 1e6 * (span.end - span.begin),
            }
            for span in spans
        ]
    return {"traceEvents": events}

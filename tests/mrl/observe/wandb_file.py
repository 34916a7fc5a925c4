"""Reader of an offline run's .wandb file: records framed as in LevelDB's log format."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER = 32768, struct.Struct("<IHB")
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Yield the complete records; a killed writer may leave a torn one."""
    data, at, whole = path.read_bytes(), len(":W&B") + 3, b""
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = HEADER.unpack_from(data, at)
        if kind == 0:
            return
        whole += data[at + HEADER.size : at + HEADER.size + size]
        at += HEADER.size + size
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def history(path: Path) -> list[dict[str, Any]]:
    rows = [record.history for record in records(path) if record.HasField("history")]
    return [{i.key or i.nested_key[0]: json.loads(i.value_json) for i in row.item} for row in rows]

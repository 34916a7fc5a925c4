"""Write the golden checkpoint of the current format: `python -m tests.mrl.training.make_golden`.

Run it once for every new checkpoint_folder.VERSION, so that later programs are tested on these files.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mrl.training.checkpoint.checkpoint_folder import MANIFEST, VERSION
from tests.mrl.training.scenarios import digest_parameters, train, worker
from tests.ranks import run_ranks
from tests.tiny_models import write_model

GOLDEN = Path(__file__).parent / "golden" / f"version-{VERSION}"
EXTRA = {"next_step": 3, "supply": {"position": 17}}
SHAPE: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_hidden_layers": 1,
    "moe_intermediate_size": 8,
    "num_experts": 2,
}


def write(rank: int, world: int, port: int, model: str, out: str) -> dict[str, Any]:
    """Train two steps, save, and return the results of the next two."""
    at = worker(rank, world, port, model, {})
    train(at, 2)
    at.save_checkpoint(out, EXTRA)
    return {"digest": digest_parameters(at.policy), "metrics": train(at, 2)}


def main() -> None:
    shutil.rmtree(GOLDEN.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", **SHAPE)
        (expected,) = run_ranks(write, 1, str(model), str(GOLDEN / "checkpoint"))
    manifest = json.loads((GOLDEN / "checkpoint" / MANIFEST).read_text())
    del manifest["about"]["model"]  # another machine draws a model of other bytes
    (GOLDEN / "checkpoint" / MANIFEST).write_text(json.dumps(manifest, indent=1))
    (GOLDEN / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()

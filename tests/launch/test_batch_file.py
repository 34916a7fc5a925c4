"""The batch file's requests to Slurm, read without a Slurm (test_slurm.py runs it under one)."""

from __future__ import annotations

import re
from pathlib import Path

from mrl.config.sections.launch import LaunchSection

SCRIPT = (Path(__file__).parents[2] / "slurm" / "qwen3_moe_grpo.sh").read_text()


def test_a_job_has_all_of_its_nodes() -> None:
    """--exclusive includes neither memory (for off-load) nor a step's cores (for loading, rewards)."""
    options = re.findall(r"^#SBATCH (--\S+)", SCRIPT, re.MULTILINE)
    assert {"--exclusive", "--mem=0", "--ntasks-per-node=1", "--nodes=1"} <= set(options)
    step = SCRIPT[SCRIPT.index("\nsrun ") :]
    assert '--cpus-per-task="$CPUS" --mem=0' in step
    assert "CPUS=${SLURM_CPUS_ON_NODE:-1}" in SCRIPT


def test_every_node_counts_its_gpus_itself() -> None:
    """Slurm reports GPUs only if the job requested them; else a GPU run started without them."""
    assert "SLURM_GPUS" not in SCRIPT


def test_launch_settings_reach_the_nodes() -> None:
    step = SCRIPT[SCRIPT.index("\nsrun ") :]
    for variable, name, option in (
        ("SLOTS", "slots_per_node", '--slots "$2"'),
        ("STORE", "object_store_bytes", '--object-store-bytes "$3"'),
    ):
        assert name in LaunchSection.model_fields
        assert f"{variable}=$(setting {name})" in SCRIPT
        assert option in step

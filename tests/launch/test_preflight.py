"""Which faults preflight reports, and which node it names."""

import dataclasses
from pathlib import Path

import pytest

from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import load_hardware
from mrl.config.load import load
from mrl.files import CONFIGS
from mrl.launch.cluster.gpus import Gpus
from mrl.launch.cluster.node_facts import (
    NodeFacts,
    NodeProbe,
    RayPart,
    active_ports,
    cgroup_memory_left,
    skew,
    write_speed,
)
from mrl.launch.preflight import NodeRequirements, idle_nodes, node_faults, too_few_slots

GOOD = NodeFacts(
    number=0,
    host="a",
    versions={"torch": "2.13.0", "ray": "2.60.0"},
    memory_bytes=64 << 30,
    shared_memory_bytes=8 << 30,
    disk_bytes=100 << 30,
    disk_bytes_per_second=1e9,
    open_files=65536,
    clock_skew_seconds=0.1,
    gpus=Gpus(
        free_shares=(0.99, 0.98), driver="580.1", visible="0,1", torch=2, torch_cuda="13.0", engine="gpu"
    ),
    error="",
    ray=RayPart(slots=2, gpus=2, object_store_bytes=32 << 20),
)


def nodes(**changes: object) -> list[NodeFacts]:
    """Return three good nodes, with changes to the last one."""
    others = [dataclasses.replace(GOOD, number=n, host=f"host{n}") for n in range(2)]
    return [*others, dataclasses.replace(GOOD, number=2, host="host2", **changes)]


def test_equal_nodes_have_no_faults() -> None:
    assert node_faults(nodes(), NodeRequirements()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {"torch": "2.12.0", "ray": "2.60.0"}}, "torch is 2.12.0, on the other nodes 2.13.0"),
        ({"versions": {"torch": "2.13.0"}}, "ray is absent, on the other nodes 2.60.0"),
        ({"memory_bytes": 1 << 30}, "free memory is"),
        ({"shared_memory_bytes": 64 << 20}, "shared memory"),
        ({"disk_bytes": 1 << 20}, "free disk"),
        ({"disk_bytes_per_second": 1e6}, "write speed"),
        ({"open_files": 256}, "limit of open files"),
        ({"clock_skew_seconds": -7.0}, "its clock is -7.0 s off"),
        ({"gpus": dataclasses.replace(GOOD.gpus, free_shares=(0.99, 0.4))},
         "GPU 1 has 40% of its memory free"),
        ({"ray": RayPart(slots=2, gpus=2, object_store_bytes=9 << 30)},
         "which Ray's object store uses (launch.object_store_bytes), is 8.59e+09 bytes, needed 9.66e+09"),
        ({"ray": RayPart(slots=2)}, "Ray has none"),
        ({"error": "the run folder /x cannot be written"}, "cannot be written"),
    ],
)  # fmt: skip
def test_one_bad_node_is_named_with_its_fault(changes: dict, message: str) -> None:
    faults = node_faults(nodes(**changes), NodeRequirements())
    assert len(faults) == 1
    assert faults[0].startswith("node 2 (host2): ")
    assert message in faults[0]


def test_a_node_that_cannot_hold_what_its_trainers_off_load_is_refused() -> None:
    (first, *_) = faults = node_faults(nodes(memory_bytes=50 << 30), NodeRequirements(host_bytes=60 << 30))
    assert len(faults) == 1
    assert first.startswith("node 2 (host2): free memory, which trainers need for weights")
    assert "--mem=0" in first and "is 5.37e+10 bytes, needed 6.44e+10" in first


def test_what_a_recipes_trainers_need_is_the_capacity_estimates() -> None:
    config = load(
        [CONFIGS / "qwen3_30b_a3b.yaml"],
        ["run.name=r", f"model.path={CONFIGS / 'models' / 'Qwen3-30B-A3B'}", "data.train=/rows"],
    )
    needed = NodeRequirements.of(config, slots=8, gpus=True).host_bytes
    assert needed == max(moment.total for moment in Estimate(config, load_hardware("8x141gb")).host) > 2e11
    assert NodeRequirements.of(config, slots=8, gpus=False).host_bytes == 0, (
        "nothing is off-loaded without GPUs"
    )


def test_a_store_too_small_for_a_steps_samples_is_named() -> None:
    """64 MB of /dev/shm, a container's default, leave Ray its minimum; a laptop's step needs less."""
    (fault,) = node_faults(nodes(), NodeRequirements(object_store_bytes=64 << 20))[:1]
    assert (
        "Ray's object store (launch.object_store_bytes" in fault
        and "is 3.36e+07 bytes, needed 6.71e+07" in fault
    )
    laptop = load([CONFIGS / "quickstart.yaml", CONFIGS / "quickstart_model.yaml"], ["model.path=/nowhere"])
    assert NodeRequirements.of(laptop, slots=2, gpus=False).object_store_bytes == 0, (
        "its model is yet to be made"
    )
    recipe = [CONFIGS / "qwen3_30b_a3b.yaml"], ["data.train=/rows", "run.name=r"]
    model = f"model.path={CONFIGS / 'models' / 'Qwen3-30B-A3B'}"
    plain, routed = (
        NodeRequirements.of(
            load(recipe[0], [*recipe[1], model, *settings]), slots=8, gpus=True
        ).object_store_bytes
        for settings in ([], ["routing.replay=engine"])
    )
    assert 1e7 < plain < 1e9 and 5 * plain < routed < 100 * plain


def test_slots_are_enough_and_nodes_without_one_are_named() -> None:
    assert too_few_slots(6, nodes()) == []
    (fault,) = too_few_slots(7, nodes())
    assert fault.startswith("the layout needs 7 slots, the nodes have 2 + 2 + 2 (Ray resource")
    assert idle_nodes(5, nodes()) == []
    assert idle_nodes(3, nodes()) == ["node 2 (host2)"]


def test_a_jobs_own_limit_of_memory_counts(tmp_path: Path) -> None:
    """The outer of two nested groups has the lower limit; its file cache can be reclaimed."""
    membership, inner = tmp_path / "own", tmp_path / "root" / "job" / "step"
    inner.mkdir(parents=True)
    membership.write_text("0::/job/step\n")
    assert cgroup_memory_left(tmp_path / "root", membership) == float("inf")
    for folder, limit in ((inner, "max"), (inner.parent, "1000")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("700")
        (folder / "memory.stat").write_text("anon 400\ninactive_file 200\nactive_file 50\n")
    assert cgroup_memory_left(tmp_path / "root", membership) == 550


def test_the_majority_is_right_about_versions() -> None:
    first, second, third = nodes()
    odd = dataclasses.replace(first, versions={"torch": "9", "ray": "2.60.0"})
    assert node_faults([odd, second, third], NodeRequirements()) == [
        "node 0 (host0): torch is 9, on the other nodes 2.13.0"
    ]


def test_a_clock_is_only_as_wrong_as_the_travel_time_allows() -> None:
    assert skew(10.0, 12.0, 13.0) == 0
    assert skew(10.0, 15.0, 13.0) == 2
    assert skew(10.0, 9.0, 13.0) == -1


def test_this_machine_has_facts(tmp_path) -> None:
    facts = NodeProbe().gather(3, str(tmp_path / "run"))
    assert facts.number == 3
    assert facts.versions["ray"].count(".") == 2
    assert facts.memory_bytes > 0
    assert facts.disk_bytes_per_second > 0
    assert facts.error == ""
    assert facts.line().startswith("node 3 (")
    assert list((tmp_path / "run").iterdir()) == []
    assert write_speed(tmp_path) > 0


def test_drivers_that_disagree_are_named_with_their_nodes(tmp_path, monkeypatch) -> None:
    program, seen = tmp_path / "nvidia-smi", []
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for driver, model in (("580.1", "H100"), ("580.1", "H100"), ("570.8", "H200")):
        program.write_text(
            f"#!/bin/sh\necho '80000, 81559, {driver}, Default, Disabled, 0, NVIDIA {model}'\n"
        )
        program.chmod(0o755)
        facts = NodeProbe().gather(len(seen), str(tmp_path / "run"))
        seen.append(dataclasses.replace(GOOD, number=len(seen), versions=facts.versions))
    assert node_faults(seen, NodeRequirements()) == [
        "node 2 (a): GPU model is NVIDIA H200, on the other nodes NVIDIA H100",
        "node 2 (a): nvidia driver is 570.8, on the other nodes 580.1",
    ]


def test_a_node_with_a_port_of_the_network_down_is_named(tmp_path) -> None:
    counts = []
    for node, states in enumerate((["4: ACTIVE"] * 2, ["4: ACTIVE"] * 2, ["4: ACTIVE", "1: DOWN"])):
        for number, state in enumerate(states):
            port = tmp_path / str(node) / f"mlx5_{number}" / "ports" / "1"
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")
        counts.append(active_ports(tmp_path / str(node)))
    versions = [{"active InfiniBand ports": count} for count in counts]
    facts = [dataclasses.replace(node, versions=v) for node, v in zip(nodes(), versions, strict=True)]
    assert node_faults(facts, NodeRequirements()) == [
        "node 2 (host2): active InfiniBand ports is 1, on the other nodes 2"
    ]
    assert active_ports(tmp_path / "none") == ""


def test_a_run_folder_that_cannot_be_made_is_a_fact(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    facts = NodeProbe().gather(0, str(tmp_path / "file" / "run"))
    assert "cannot be written" in facts.error
    faulty = dataclasses.replace(GOOD, number=0, error=facts.error)
    assert node_faults([faulty], NodeRequirements()) == [f"{faulty.name}: {facts.error}"]

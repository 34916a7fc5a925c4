"""What preflight calls a fault, and whom it names."""

import dataclasses

import pytest

from mrl.launch.cluster.node_facts import NodeFacts, gather, skew, write_speed
from mrl.launch.preflight import Floors, faults

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
    gpu_free_shares=(0.99, 0.98),
    error="",
)


def nodes(**changes: object) -> list[NodeFacts]:
    """Three good nodes, the last one changed."""
    others = [dataclasses.replace(GOOD, number=n, host=f"host{n}") for n in range(2)]
    return [*others, dataclasses.replace(GOOD, number=2, host="host2", **changes)]


def test_equal_nodes_have_no_faults() -> None:
    assert faults(nodes(), Floors()) == []


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
        ({"gpu_free_shares": (0.99, 0.4)}, "GPU 1 has 40% of its memory free"),
        ({"error": "the run folder /x cannot be written"}, "cannot be written"),
    ],
)
def test_one_bad_node_is_named_with_its_fault(changes: dict, message: str) -> None:
    found = faults(nodes(**changes), Floors())
    assert len(found) == 1
    assert found[0].startswith("node 2 (host2): ")
    assert message in found[0]


def test_every_fault_is_told() -> None:
    found = faults(nodes(memory_bytes=0, open_files=1), Floors())
    assert len(found) == 2


def test_the_majority_is_right_about_versions() -> None:
    first, second, third = nodes()
    odd = dataclasses.replace(first, versions={"torch": "9", "ray": "2.60.0"})
    assert faults([odd, second, third], Floors()) == ["node 0 (host0): torch is 9, on the other nodes 2.13.0"]


def test_a_clock_is_only_as_wrong_as_the_travel_time_allows() -> None:
    assert skew(10.0, 12.0, 13.0) == 0
    assert skew(10.0, 15.0, 13.0) == 2
    assert skew(10.0, 9.0, 13.0) == -1


def test_this_machine_has_facts(tmp_path) -> None:
    facts = gather(3, str(tmp_path / "run"))
    assert facts.number == 3
    assert facts.versions["ray"].count(".") == 2
    assert facts.memory_bytes > 0
    assert facts.disk_bytes_per_second > 0
    assert facts.error == ""
    assert facts.line().startswith("node 3 (")
    assert list((tmp_path / "run").iterdir()) == []
    assert write_speed(tmp_path) > 0


def test_a_run_folder_that_cannot_be_made_is_a_fact(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    facts = gather(0, str(tmp_path / "file" / "run"))
    assert "cannot be written" in facts.error
    assert faults([facts], Floors(disk_bytes=0, disk_bytes_per_second=0)) == [f"{facts.name}: {facts.error}"]

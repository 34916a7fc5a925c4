"""Measure a weight sync between two pools on simulated nodes, and compare it with the plan's seconds.

    python -m benchmarks.resharding.pools --gbit 0.2 --nodes 0,1,2,2 \\
        --model qwen3-30b-a3b --scale 0.05 --train 1,1,2 --rollout 1,2

`--nodes`: the node of every trainer rank, then of every engine rank. Each node is a network namespace whose
link to a common bridge has the given rate each way (a token bucket: nothing is lost). The processes of a node
share its link. Every session is proved, which is not timed. Needs root, iproute2, and a kernel with veth,
bridges and sch_tbf.

With `--overlap on`, engine ranks compute while they take a session, and stop to load it. The report has the
longest stop of a rank, proof and commit included, over the seconds of the transfer.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.resharding import models
from benchmarks.resharding.limited_link import INTERFACE, run, token_bucket
from benchmarks.resharding.storage import Storage, StorageConsumer
from benchmarks.resharding.trainer import BenchTrainer
from mrl.config.sections.sync import SyncSection
from mrl.errors import ConfigError, WeightSyncError
from mrl.models.layout import Layout
from mrl.resharding.planner import engine_manifests
from mrl.resharding.planner.plan import Plan
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.planned_sync import PlannedSync
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import Session

CPU = torch.device("cpu")
PORT = 29519
BRIDGE = "mrl-pools"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all ranks, or one (`--rank`, which the command adds itself); return 0 if all bytes are correct."""
    options = _parser().parse_args(arguments)
    if options.rank is not None:
        return _Rank(options).run()
    words = list(sys.argv[1:] if arguments is None else arguments)
    with joined_nodes(max(options.nodes) + 1, options.gbit):
        ranks = [_start(rank, node, words) for rank, node in enumerate(options.nodes)]
        try:
            return max(rank.wait(options.seconds) for rank in ranks)
        finally:
            for rank in ranks:
                rank.terminate()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, default=0.2, help="rate of a node's link in Gbit/s, each way")
    parser.add_argument("--nodes", type=_numbers, required=True, help="node of every rank, trainers first")
    parser.add_argument("--model", choices=models.NAMES, default="qwen3-30b-a3b")
    parser.add_argument("--scale", type=float, default=0.05, help="share of layers, experts, vocabulary rows")
    parser.add_argument("--train", type=_numbers, default=[1, 1, 1], help="tp,pp,ep; dp fills --trainers")
    parser.add_argument("--trainers", type=int, default=2, help="number of trainer ranks")
    parser.add_argument("--rollout", type=_numbers, default=[1, 1], help="tp,ep of engines")
    parser.add_argument("--bucket-mib", type=float, default=4.0)
    parser.add_argument("--delta", choices=("off", "auto", "on"), default="off", help="as sync.delta")
    parser.add_argument(
        "--changed", type=float, default=1.0, help="share of elements that change from version to version"
    )
    parser.add_argument("--overlap", choices=("off", "on"), default="off", help="as sync.overlap")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600.0, help="deadline of the whole run in seconds")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    return parser


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


@contextlib.contextmanager
def joined_nodes(count: int, gbit: float) -> Iterator[None]:
    """Join namespaces by a bridge in a namespace of its own, then remove all."""
    names = [BRIDGE, *(_name(node) for node in range(count))]
    _remove(names)
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(*f"ip -n {BRIDGE} link add {BRIDGE} type bridge".split())
        run(*f"ip -n {BRIDGE} link set {BRIDGE} up".split())
        for node in range(count):
            _join(node, gbit)
        yield
    finally:
        _remove(names)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, timeout=30, check=False)


def _join(node: int, gbit: float) -> None:
    name, port = _name(node), f"port{node}"
    run(*f"ip link add {INTERFACE} netns {name} type veth peer name {port} netns {BRIDGE}".split())
    run(*f"ip -n {BRIDGE} link set {port} master {BRIDGE} up".split())
    run(*f"ip -n {name} addr add {_address(node)}/24 dev {INTERFACE}".split())
    for interface in ("lo", INTERFACE):
        run("ip", "-n", name, "link", "set", interface, "up")
    run(*f"ip -n {name} route add default dev {INTERFACE}".split())
    for space, interface in ((name, INTERFACE), (BRIDGE, port)):
        run("tc", "-n", space, "qdisc", "add", "dev", interface, "root", *token_bucket(gbit).split())


def _name(node: int) -> str:
    return f"mrl-pool-{node}"


def _address(node: int) -> str:
    return f"10.98.0.{node + 1}"


def _start(rank: int, node: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [
        "ip",
        "netns",
        "exec",
        _name(node),
        sys.executable,
        "-m",
        "benchmarks.resharding.pools",
        *words,
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, "--rank", str(rank)], env=environment)


class _Rank:
    """One rank of either pool, in its node's namespace."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self._options, self._trainers = options, options.trainers
        tp, pp, ep = options.train
        if self._trainers % (tp * pp):
            raise ConfigError(f"--train tp x pp = {tp} x {pp} must divide --trainers {self._trainers}")
        self._train = Layout(tp=tp, pp=pp, ep=ep, dp=self._trainers // (tp * pp))
        self._engines = len(options.nodes) - self._trainers
        self._rollout = Layout(
            tp=options.rollout[0], dp=self._engines // options.rollout[0], ep=options.rollout[1]
        )
        self._hf = models.config_of(options.model, scale=options.scale, train=self._train)
        self._sync = SyncSection(
            bucket_bytes=int(options.bucket_mib * (1 << 20)), transport="distributed",
            deadline_seconds=options.seconds, delta=options.delta, overlap=options.overlap,
        )  # fmt: skip
        self._wait = datetime.timedelta(seconds=options.seconds)
        self._store: Any = None

    def run(self) -> int:
        rank = self._options.rank
        if rank < self._trainers > 1:
            dist.init_process_group(
                "gloo", init_method=f"tcp://{_address(self._options.nodes[0])}:{PORT}", rank=rank,
                world_size=self._trainers, timeout=self._wait,
            )  # fmt: skip
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            _address(self._options.nodes[0]), PORT, is_master=rank == 0 and self._trainers == 1,
            wait_for_workers=False, timeout=self._wait,
        )  # fmt: skip
        code = self._send() if rank < self._trainers else self._receive(rank - self._trainers)
        self._meet("end")
        if rank == 0:
            time.sleep(1.0)  # it hosts the store, from which the others read that all have met
        return code

    def _send(self) -> int:
        rank, options = self._options.rank, self._options
        trainer = BenchTrainer(self._hf, self._train, rank, device=CPU)
        addresses = [self._store.get(f"address{r}").decode() for r in range(self._engines)]
        topology = Topology.separate_pools(options.nodes, num_trainers=self._trainers)
        manifests = engine_manifests.engine_rank_manifests(self._hf, self._rollout)
        store = f"tcp://{_address(options.nodes[0])}:{PORT}"
        weight_sync = PlannedSync(trainer, self._sync, addresses, manifests, topology=topology, store=store)
        self._store.set("digest", weight_sync.digest)
        seconds, sent, transfers = [], [], []
        trainer.fill(0)
        for version in range(options.repeats + 1):
            if version:
                _change(trainer, version, options.changed)
            self._meet(f"filled{version}")
            session = _session(version, weight_sync.digest)
            if options.overlap == "on":
                started = time.monotonic()
                weight_sync.send_ahead(session)
                transfers.append(time.monotonic() - started)
                self._store.set(f"taken{version}", "")
                figures = weight_sync.commit()
            else:
                figures = weight_sync.send(session)
            seconds.append(figures["move_seconds"])
            sent.append(int(figures.get("sent_bytes", 0)))
        if rank == 0:
            self._show(weight_sync.plan, seconds, sent, transfers)
        weight_sync.close()
        trainer.close()
        return 0

    def _receive(self, number: int) -> int:
        storage = Storage(engine_manifests.engine_rank_manifests(self._hf, self._rollout)[number], CPU)
        host = _address(self._options.nodes[self._options.rank])
        receiver = Receiver(deadline_seconds=self._options.seconds, device=CPU, host=host)
        self._store.set(f"address{number}", receiver.address)
        digest = self._store.get("digest").decode()
        for version in range(self._options.repeats + 1):
            storage.poison()
            self._meet(f"filled{version}")
            session, steps = _session(version, digest), 0
            if self._options.overlap == "on":
                receiver.stage(session)
                steps = self._compute_until(f"taken{version}")
            started = time.monotonic()
            receiver.receive(session, StorageConsumer(storage))
            stopped = time.monotonic() - started
            self._store.set(f"stop{version}-{number}", json.dumps([stopped, steps]))
        receiver.close()
        return 0

    def _compute_until(self, name: str) -> int:
        """Multiply matrices, as a stand-in for generation, until the store has `name`; return how often."""
        steps, weights = 0, torch.ones(256, 256)
        while not self._store.check([name]):
            weights = torch.softmax(weights @ weights, dim=1)
            steps += 1
        return steps

    def _meet(self, name: str) -> None:
        self._store.add(name, 1)
        deadline = time.monotonic() + self._options.seconds
        while self._store.add(name, 0) < len(self._options.nodes):
            if time.monotonic() > deadline:
                raise WeightSyncError(f"not all ranks came to {name}")
            time.sleep(0.02)

    def _show(
        self, plan: Plan, seconds: Sequence[float], sent: Sequence[int], transfers: Sequence[float]
    ) -> None:
        """Print what was measured beside what the links need at full rate, without the first session."""
        into, out = plan.traffic[2], plan.traffic[4]
        rate = self._options.gbit * 1e9 / 8
        nodes = np.array(self._options.nodes)
        busiest = max(
            max(into[nodes == node].sum(), out[nodes == node].sum()) for node in range(nodes.max() + 1)
        )
        measured = statistics.median(seconds[1:])
        report = {
            **plan.summary(),
            "busiest_link_bytes": int(busiest),
            "predicted_seconds": busiest / rate,
            "measured_seconds": measured,
            "measured_over_predicted": measured * rate / busiest,
            "all_seconds": list(seconds),
            "sent_bytes_of_rank_0": list(sent),
        }
        if transfers:
            report |= self._stops(transfers)
        print(json.dumps(report, indent=1), flush=True)

    def _stops(self, transfers: Sequence[float]) -> dict[str, Any]:
        """Return how long engine ranks stopped after each transfer, and how much they computed during it."""
        stops = []
        for version in range(1, len(transfers)):
            ranks = [json.loads(self._store.get(f"stop{version}-{n}")) for n in range(self._engines)]
            stops.append((max(stop for stop, _ in ranks), min(steps for _, steps in ranks)))
        ratios = [stop / transfer for (stop, _), transfer in zip(stops, transfers[1:], strict=True)]
        return {
            "transfer_seconds": list(transfers),
            "stop_seconds": [stop for stop, _ in stops],
            "least_steps_meanwhile": [steps for _, steps in stops],
            "stop_over_transfer": statistics.median(ratios),
        }


def _session(version: int, digest: str) -> Session:
    return Session(f"{version:032x}", version - 1, version, digest)


def _change(trainer: BenchTrainer, version: int, share: float) -> None:
    """Change the lowest bit of a share of the elements, alike on all replicas."""
    for local, tensor, _, _ in trainer.local_tensors():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{version} {local.name}".encode()))
        words = tensor.view(-1).view(torch.int16)
        words[torch.rand(words.numel(), generator=generator) < share] ^= 1


if __name__ == "__main__":
    sys.exit(main())

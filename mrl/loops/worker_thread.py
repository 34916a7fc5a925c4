"""Event loop of a rollout worker's process, in its own thread, and the socket that the driver connects to."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

from msgspec import MsgspecError

from mrl.agents.environment_client import Environments
from mrl.loops.event_thread import EventThread
from mrl.loops.rollout_thread import in_this_process
from mrl.observe.phases import PhaseClock
from mrl.processes.framing import frame, read_frame_async
from mrl.rollout.engine_messages import STREAM_BYTES
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.engine_server import PROOF_SECONDS
from mrl.rollout.handshake import is_proved
from mrl.trajectories import worker_messages
from mrl.trajectories.group import RolloutRunner, RulesOf
from mrl.trajectories.rewards import RewardWorkers
from mrl.trajectories.rollout_worker import RolloutWorker
from mrl.trajectories.worker_messages import GroupStart

log = logging.getLogger(__name__)


class WorkerThread(EventThread):
    """Server of one driver over a listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        names: Sequence[str],
        rewards: RewardWorkers,
        *,
        run_seed: int,
        by_index: bool,
        environments: Environments | None = None,
        rules_of: RulesOf = lambda domain: None,
        max_environments: int | None = None,
    ) -> None:
        """Start serving.

        Args:
            secret: Proves the driver to this process, and this process to the engines.
            names: Names of all engines of the run, for messages.
            by_index: A prompt's engine follows from its index.
            environments, rules_of, max_environments: As in `in_this_process`.
        """
        super().__init__("rollout worker", PhaseClock())
        self._secret = secret
        self._writer: asyncio.StreamWriter | None = None
        self._worker: RolloutWorker
        self._runner: RolloutRunner
        self._server: asyncio.Server

        async def build() -> None:
            pool = EnginePool(
                names,
                secret=secret,
                run_seed=run_seed,
                by_index=by_index,
                on_lost=lambda *lost: self._worker.engine_gone(*lost),
            )
            make = in_this_process(
                lambda thread: pool,
                rewards,
                run_seed=run_seed,
                environments=environments,
                rules_of=rules_of,
                max_environments=max_environments,
            )
            self._runner = make(self)
            self._worker = RolloutWorker(self._runner, pool, self._send)
            self._server = await asyncio.start_server(self._connected, sock=listener, limit=STREAM_BYTES)

        self.do(build())

    def begin(self, groups: Sequence[GroupStart]) -> None:
        """Start groups."""
        self._aio.call_soon_threadsafe(self._worker.begin, groups)

    def drop(self, groups: Sequence[int]) -> None:
        """Forget groups, by their numbers."""
        self._aio.call_soon_threadsafe(self._worker.drop, groups)

    def fail(self, error: BaseException) -> None:
        """Report to the driver the error that ends the run."""
        log.error("the rollout worker failed", exc_info=error)
        self._aio.call_soon_threadsafe(self._worker.failed, error)

    def close(self) -> None:
        """End all tasks and the threads."""
        super().close()
        self._runner.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                proved = await is_proved(reader, writer, self._secret)
            if not proved or self._writer is not None:
                return
            self._writer = writer
            self._worker.report()
            while (data := await read_frame_async(reader)) is not None:
                self._worker.heard(worker_messages.decode_worker_message(data))
        except (TimeoutError, OSError, EOFError, ValueError, MsgspecError) as error:
            log.warning("a connection to the rollout worker ended: %s", error)
        finally:
            writer.close()

    def _send(self, message: worker_messages.WorkerMessage) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(worker_messages.encode_worker_message(message)))

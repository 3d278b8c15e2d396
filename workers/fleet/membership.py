"""A worker's membership of its fleet: its slot, its link to the broker, and the recorder that outlives it."""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.schemas.accounts.ledger import Drop
from headrace.schemas.accounts.recorder import Recorder
from headrace.schemas.accounts.user_calls import UserCall
from headrace.schemas.basics.headrace_version import headrace_version
from headrace.schemas.chunks.module_spaces import module_spaces_to_json
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.credentials.keys import client_keys
from headrace.schemas.errors import HeadraceError
from headrace.schemas.frames.compression import LZ4, readable_encodings
from headrace.schemas.messages import WorkerHello
from headrace.schemas.messages.shared_weights import SharedWeights
from headrace.schemas.peers.advertised import is_own_address
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.plugins import check_package
from headrace.workers.fleet.call_watch import CallWatch
from headrace.workers.fleet.link import FleetLink
from headrace.workers.fleet.session import SessionState, WorkerSession
from headrace.workers.fleet.weights import WeightsReceiver
from headrace.workers.fleet.window import SessionLimits

log = logging.getLogger(__name__)

BUILD_SILENCE_S = 300.0
"""Seconds that a worker may be silent while it builds its envs."""


class Membership:
    """The membership of one incarnation, from the broker's WELCOME until `close`. For the sampling thread alone.

    While that thread runs the user's code, it lends the link to a thread that sends heartbeats; see `lent`.
    """

    def __init__(
        self,
        config: FleetConfig,
        endpoint: str,
        fleet_id: str,
        slot: int | None,
        incarnation: int,
        recorder_dir: Path,
        stopping: threading.Event | None = None,
        place: FleetPlace | None = None,
    ) -> None:
        """Get a place from the broker, waiting for it `worker.connect_timeout_s` at most.

        The recorder is recorder_dir/worker-{slot}-{incarnation}.rec. Raises `KeysError`, `UnreachableError`, the error
        of the broker's refusal, or `StoppedError` when `stopping` is set before the broker answers. `place` has the
        broker's address where it may change; `endpoint` is the first one.
        """
        self._stopping = stopping
        self.fleet_id = fleet_id
        self.session = _session(config, fleet_id, slot, incarnation)
        self._shared = SharedWeights(fleet_id)
        self.weights = WeightsReceiver(fleet_id, self._shared)
        self._connect_timeout_s = config.worker.connect_timeout_s
        self._compression = config.worker.compression
        if self._compression == LZ4:
            check_package("compression", "lz4", "lz4", key="worker.compression")
        self._compresses, self._asked = False, self.session.welcome
        """True while batches are compressed, and the WELCOME by which that was decided."""
        keys = client_keys(config.keys.dir, "worker", config.keys.group)
        self.link = FleetLink(place or FleetPlace(endpoint), self.session, self.weights, keys)
        self._told = (self.session.settled, self.session.accepted)
        """The settled and accepted batches that the recorder shows."""
        try:
            self.link.join(self._connect_timeout_s, self._stopping)
            self.slot, self.incarnation = self.session.slot or 0, self.session.incarnation
            recorder_dir.mkdir(parents=True, exist_ok=True)
            name = f"worker-{self.slot}-{self.incarnation}.rec"
            self.recorder = Recorder(recorder_dir / name, self.slot, self.incarnation)
        except BaseException:
            self.link.close()
            self._shared.close()
            raise
        self.lock = threading.Lock()
        """Held by whoever uses the link while it is lent."""
        self._is_lent = False
        self._error: HeadraceError | None = None
        """Error of a pump that was not the sampling thread's."""
        self._watch = CallWatch(config.sampling.call_limits(), self.recorder, self._keep_alive)
        self.expect_silence()
        log.info("joined fleet %s as slot %d incarnation %d", fleet_id, self.slot, self.incarnation)

    def expect_silence(self) -> None:
        """Tell the recorder's readers to expect silence, because the worker builds envs or waits for them."""
        self.recorder.touch(BUILD_SILENCE_S)

    def introduce(self, spaces: Mapping[str, Spaces], **built: Any) -> None:
        """Report the newly built envs and modules to the broker, and wait for its answer.

        `spaces`: those of chunks, by module. `built`: further fields of `WorkerHello`. Raises as the constructor does.
        """
        self.session.introduce(spaces=module_spaces_to_json(spaces), **built)
        self.recorder.touch()
        self.link.join(self._connect_timeout_s, self._stopping)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let heartbeats go on in the block, however long the user's code in it takes.

        In the block only the holder of `lock` may use the link and the session.
        """
        self._lend(True)
        try:
            yield
        finally:
            self._lend(False)

    def _lend(self, is_lent: bool) -> None:
        with self.lock:
            self._is_lent, self.recorder.call[0] = is_lent, UserCall.OTHER if is_lent else UserCall.NONE

    def _keep_alive(self, env_silence_s: float | None, env_call: str) -> None:
        """Send what is due, in another thread than the sampling one. Its next pump raises an error of this one.

        `env_silence_s` of None keeps what the sampling thread noted last.
        """
        with self.lock:
            if not self._is_lent or self._error is not None:
                return
            session = self.session
            session.repeats_figures = True
            if env_silence_s is not None:
                session.env_silence_s, session.env_call = env_silence_s, env_call
            try:
                self.link.pump()
            except HeadraceError as error:
                self._error = error
            finally:
                session.repeats_figures = False

    def pump(self, wait_s: float = 0.0) -> None:
        """Pump the link, and record what the broker has accepted.

        Raises as `BrokerLink.pump` does, the error that ended the session, or that of a broker that is gone for good.
        """
        if self._error is not None:
            raise self._error
        self.link.pump(wait_s)
        told = (self.session.settled, self.session.accepted)
        if told != self._told:
            self._told = told
            self.recorder.settled(*told)
        if self.session.over:
            self.link.raise_refusal()
        if self.link.place.ended is not None:
            raise self.link.place.ended

    def compresses(self) -> bool:
        """Return whether to compress batches for the current broker, as `worker.compression` says.

        The broker must be able to read them. Whether the broker is on another machine is checked once for each WELCOME.
        """
        welcome = self.session.welcome
        if welcome is not self._asked:
            self._asked, self._compresses = welcome, self._may_compress()
        return self._compresses

    def _may_compress(self) -> bool:
        wanted, welcome = self._compression, self.session.welcome
        if wanted == "none" or (wanted == "auto" and is_own_address(self.link.endpoint)):
            return False
        taken = welcome is not None and LZ4 in welcome.encodings
        if wanted == LZ4 and not taken:
            log.warning("the broker at %s has no package lz4, so batches are not compressed", self.link.endpoint)
        return taken and LZ4 in readable_encodings()

    def leave(self, left_s: float = 1.0) -> None:
        """Send BYE, and wait up to `left_s` seconds for the broker to acknowledge it, if the fleet has not stopped."""
        self.session.leave(Drop.SHUTDOWN)
        self.link.wait_until(lambda: self.session.state is SessionState.LEFT or self.link.fleet_has_stopped(), left_s)
        if self.session.state is not SessionState.LEFT:
            stopped = "the fleet has stopped; the recorder keeps the books for its next start"
            silent = "the broker did not acknowledge the end; the recorder keeps the books for the supervisor"
            log.warning("%s", stopped if self.link.fleet_has_stopped() else silent)
        self.recorder.settled(self.session.settled, self.session.accepted)

    def close(self) -> None:
        """Close the link and the recorder. Keep its file and the shared weights."""
        self._watch.stop()
        self.link.close()
        self._shared.close()
        self.recorder.close()


def _session(config: FleetConfig, fleet_id: str, slot: int | None, incarnation: int) -> WorkerSession:
    hello = WorkerHello(
        fleet_id=fleet_id,
        token=os.urandom(8).hex(),
        slot=slot,
        incarnation=incarnation,
        host=platform.node(),
        pid=os.getpid(),
        headrace_version=headrace_version(),
        silence_s=BUILD_SILENCE_S,
    )
    limits = SessionLimits(
        config.window_batches(),
        config.window_bytes,
        window_steps=config.window_steps(),
        window_env_steps=config.window_env_steps(),
        follows_learner=config.worker.window_batches is None,
    )
    return WorkerSession(hello, limits)

"""The broker process: one poll loop that carries messages between sockets and the core without reading array bytes."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from headrace.broker.core import BrokerCore
from headrace.broker.limits import BrokerLimits, BrokerState
from headrace.broker.metrics import FleetMetrics
from headrace.broker.outbox import Send
from headrace.broker.redis_rows import ReceivedRow
from headrace.broker.reporter import RedisReporter
from headrace.broker.sockets import BrokerSockets, Socket, receive, send
from headrace.broker.state_file import read_broker_file, write_broker_file
from headrace.broker.weights_relay import WeightsRelay
from headrace.schemas.batch import read_batch_header
from headrace.schemas.config import BrokerSection, FleetConfig
from headrace.schemas.errors import ConfigError, DecodeError
from headrace.schemas.keys import BrokerKeys, read_broker_keys
from headrace.schemas.messages import (
    Bye,
    Commit,
    Heartbeat,
    LearnerHello,
    LearnerRows,
    Message,
    Obituary,
    Reject,
    Skip,
    WeightsAck,
    WeightsPull,
    read,
    read_hello,
)
from headrace.schemas.stop_event import stop_event
from headrace.schemas.weights import read_weights
from headrace.schemas.wire import MessageKind, WireLimits, decode, decode_header

log = logging.getLogger(__name__)

_CONTROL: dict[MessageKind, type[Message]] = {m.KIND: m for m in (Heartbeat, Bye, Obituary, Skip, Commit)}
_BURST = 256
"""Messages taken from one socket before the others get their turn."""

_TICK_S = 0.05
_SAVED_WAIT_S = 1.0


def run_broker(
    config: FleetConfig, *, fleet_id: str, run_dir: Path, redis_url: str | None, max_env_steps: int | None = None
) -> None:
    """Serve until SIGTERM.

    Workers begin no fragment once the fleet has taken `max_env_steps` in its whole life. Raises `PortInUseError`,
    `RunDirError`, `ConfigError` or `KeysError` before it serves.
    """
    keys = read_broker_keys(Path(config.keys.dir)) if config.keys.dir else None
    broker = Broker(
        config.broker,
        fleet_id,
        run_dir,
        redis_url,
        keys,
        synchronous=config.sampling.synchronous,
        workers=config.fleet.workers,
        max_env_steps=max_env_steps,
    )
    with stop_event() as stopping:
        try:
            while not stopping.is_set():
                broker.step()
        finally:
            broker.close()


class Broker:
    """Sockets, core, relay and reporter of one broker, in one thread."""

    def __init__(
        self,
        config: BrokerSection,
        fleet_id: str,
        run_dir: Path,
        redis_url: str | None,
        keys: BrokerKeys | None = None,
        *,
        synchronous: bool = False,
        workers: int = 0,
        max_env_steps: int | None = None,
    ) -> None:
        before = read_broker_file(run_dir)
        if before is not None and before.fleet_id != fleet_id:
            raise ConfigError(f"{run_dir} belongs to fleet {before.fleet_id!r}, not {fleet_id!r}", key="fleet.fleet_id")
        self.config = config
        self.run_dir = run_dir
        self.fleet_id = fleet_id
        self.sockets = BrokerSockets(config, before.endpoints if before else None, keys)
        self.relay = WeightsRelay()
        self.metrics = FleetMetrics()
        limits = BrokerLimits(
            max_batch_bytes=config.max_batch_bytes,
            max_held_bytes=config.max_held_bytes,
            overflow=config.overflow,
            max_staleness=config.max_staleness,
            lease_s=config.lease_s,
            heartbeat_interval_s=config.heartbeat_interval_s,
            weights_endpoint=self.sockets.endpoints.weights,
            synchronous=synchronous,
            workers=workers,
            max_env_steps=max_env_steps,
        )
        state = before.state() if before else BrokerState()
        self.core = BrokerCore(fleet_id, limits, state, time.monotonic())
        self.reporter = RedisReporter(redis_url, fleet_id) if redis_url else None
        self._restored = self.reporter is None or self._restore(_SAVED_WAIT_S)
        self._limits = WireLimits(payload_bytes=config.max_batch_bytes)
        self._written: BrokerState | None = None
        self._next_report = 0.0
        self._next_tick = 0.0
        self._poller = zmq.Poller()
        own = (self.sockets.workers, self.sockets.learners, self.sockets.weights)
        for socket in (*own, *self.sockets.auth.sockets):
            self._poller.register(socket, zmq.POLLIN)
        self._write_state()
        how = "with keys" if keys is not None else "without keys"
        log.info("serving fleet %s %s: %s", fleet_id, how, self.sockets.endpoints.model_dump())

    def step(self) -> None:
        """Wait a moment for messages, take a burst from each socket, and answer."""
        wait_s = max(0.0, min(_TICK_S, self.core.next_due - time.monotonic()))
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        if self.sockets.learners in ready:
            self._drain(self.sockets.learners)
        if self.sockets.workers in ready:
            self._drain(self.sockets.workers)
        if self.sockets.weights in ready:
            self._answer_subscribers()
        self.sockets.auth.handle_ready(ready)
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self.core.tick(now)
        self._flush(now)
        if now >= self._next_report:
            self._next_report = now + self.config.report_interval_s
            self._report(now)

    def close(self) -> None:
        """Send what is due, report a last time, and close the sockets."""
        self._flush()
        self._report(time.monotonic())
        if self.reporter is not None:
            self.reporter.close(2.0)
        self.sockets.close()

    # -- taking messages ----------------------------------------------------------------------------------------------

    def _drain(self, socket: Socket) -> None:
        for _ in range(_BURST):
            frames = receive(socket)
            if frames is None:
                return
            peer = frames[0].bytes
            try:
                self._take(socket, peer, frames[1:])
            except DecodeError as error:
                self._refuse(socket, peer, error)

    def _take(self, socket: Socket, peer: bytes, frames: list[zmq.Frame]) -> None:
        now = time.monotonic()
        kind, header = decode_header([frame.buffer for frame in frames], self._limits)
        if kind is MessageKind.BATCH and socket is self.sockets.workers:
            self._take_batch(peer, header, frames, now)
        elif kind is MessageKind.WEIGHTS and socket is self.sockets.learners:
            self._take_weights(peer, frames)
        elif kind is MessageKind.LEARNER_ROWS and socket is self.sockets.learners:
            self._take_rows(peer, read(LearnerRows, header))
        elif kind is MessageKind.WEIGHTS_PULL:
            self._send(socket, peer, self.relay.part(read(WeightsPull, header)))
        elif kind is MessageKind.HELLO:
            self._take_hello(socket, peer, read_hello(header), now)
        elif kind in _CONTROL:
            self.core.receive(_tag(socket, self.sockets.learners, peer), read(_CONTROL[kind], header), now)
        else:
            raise DecodeError("unexpected_kind", f"{kind.name} is not for a broker")

    def _take_hello(self, socket: Socket, peer: bytes, hello: Message, now: float) -> None:
        """Handle a HELLO. One at the other role's port would never succeed, so tell its sender the right endpoint."""
        if isinstance(hello, LearnerHello) is (socket is self.sockets.learners):
            self.core.receive(_tag(socket, self.sockets.learners, peer), hello, now)
            return
        at, right = ("learner", "worker") if socket is self.sockets.learners else ("worker", "learner")
        endpoint = getattr(self.sockets.endpoints, right)
        detail = f"this is the broker's {at} endpoint; a {right} connects to {endpoint}"
        self._send(socket, peer, Reject(code="wrong_endpoint", detail=detail).frames())

    def _take_batch(self, peer: bytes, header: dict[str, Any], frames: list[zmq.Frame], now: float) -> None:
        typed = read_batch_header(header)
        nbytes = sum(len(frame) for frame in frames)
        if self.core.receive_batch(_WORKER + peer, typed, frames, nbytes, now):  # type: ignore[arg-type]
            self.metrics.observe(typed, nbytes, now)

    def _take_weights(self, peer: bytes, frames: list[zmq.Frame]) -> None:
        """Keep a version from the publisher, broadcast it, and acknowledge it. An older one is only acknowledged."""
        message = decode([frame.buffer for frame in frames])
        header, _ = read_weights(message)
        if not self.core.may_publish(_LEARNER + peer, header.version):
            return
        if self.relay.offer(header, [frame.buffer for frame in frames]):
            self.core.published(header.version, time.monotonic())
            self._broadcast()
            if self.reporter is not None:
                self.reporter.offer_weights(header.version, [bytes(frame) for frame in self.relay.frames()])
        self._send(self.sockets.learners, peer, WeightsAck(version=header.version).frames())

    def _take_rows(self, peer: bytes, message: LearnerRows) -> None:
        """Hand the learner's new rows to the reporter.

        Without Redis they count as stored, since no process reads them.
        """
        rows = self.core.new_rows(_LEARNER + peer, message)
        if not rows:
            return
        if self.reporter is None:
            self.core.rows_stored((rows[-1].epoch, rows[-1].number))
        else:
            self.reporter.offer_rows([ReceivedRow(row, time.time(), self.core.store.steps) for row in rows])

    def _refuse(self, socket: Socket, peer: bytes, error: DecodeError) -> None:
        """Tell a peer what was wrong.

        A peer whose batch cannot be read sends it again, and skips it after the third time.
        """
        tagged = _tag(socket, self.sockets.learners, peer)
        seq = self.core.next_seq(tagged)
        code = error.reason if error.reason == "version_mismatch" else "decode_error"
        log.warning("refused a message: %s", error)
        reject = Reject(code=code, detail=str(error), fatal=code == "version_mismatch" or seq == 0, seq=seq)
        self._send(socket, peer, reject.frames())

    def _answer_subscribers(self) -> None:
        """Broadcast the last version for late subscribers.

        XPUB can only send to all; subscribers that have it ignore it.
        """
        greeted = False
        for _ in range(_BURST):
            try:
                greeted |= self.sockets.weights.recv(zmq.NOBLOCK).startswith(b"\1")
            except zmq.Again:
                break
        if greeted:
            self._broadcast()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _flush(self, now: float = math.inf) -> None:
        out = self.core.take_outbox(now)
        if self.core.state != self._written:
            self._write_state()
        for message in out:
            self._deliver(message)

    def _deliver(self, message: Send) -> None:
        socket = self.sockets.learners if message.peer.startswith(_LEARNER) else self.sockets.workers
        content = message.content if isinstance(message.content, list) else message.content.frames()
        self._send(socket, message.peer[1:], content)

    def _send(self, socket: Socket, peer: bytes, frames: list[Any]) -> None:
        """Forward without copying. A peer that has gone gets nothing: it sends a HELLO when it is back."""
        try:
            send(socket, [peer, *frames])
        except zmq.ZMQError as error:
            log.debug("peer %s has gone: %s", peer.hex(), error)

    def _broadcast(self) -> None:
        frames = self.relay.broadcast()
        if frames:
            self.sockets.weights.send_multipart(frames, zmq.NOBLOCK)

    # -- what outlives the process ------------------------------------------------------------------------------------

    def _write_state(self) -> None:
        write_broker_file(self.run_dir, self.fleet_id, self.sockets.endpoints, self.core.state)
        self._written = replace(self.core.state, incarnations=dict(self.core.state.incarnations))

    def _report(self, now: float) -> None:
        if self.reporter is None:
            return
        if not self._restored:
            self._restored = self._restore(0.0)
        report = self.metrics.report(self.core, now)
        if not self._restored:  # what runners counted before is not known yet, and must not be written over
            report = replace(report, runner_state={}, metric_sums=None)
        self.reporter.offer(report)
        self.core.rows_stored(self.reporter.rows_stored)

    def _restore(self, wait_s: float) -> bool:
        """Go on from what Redis remembers. Return whether Redis answered."""
        saved = self.reporter.take_saved(wait_s=wait_s) if self.reporter else None
        if saved is None:
            return False
        self.core.restore(saved.rows.values(), saved.incarnations, saved.lease_epoch, saved.runner_state)
        self.metrics.continue_from(saved.counters)
        self.metrics.workers.go_on_from(saved.metric_sums)
        if saved.weights is not None:
            try:
                header, _ = read_weights(decode(saved.weights.frames))
            except DecodeError as error:
                log.warning("the weights in Redis are not usable: %s", error)
            else:
                if self.relay.offer(header, list(saved.weights.frames)):
                    self.core.published(header.version, time.monotonic())
        return True


_WORKER = b"w"
_LEARNER = b"l"


def _tag(socket: Socket, learners: Socket, peer: bytes) -> bytes:
    """Prefix a peer's routing id with its role: routing ids of different ROUTER sockets may be equal."""
    return (_LEARNER if socket is learners else _WORKER) + peer

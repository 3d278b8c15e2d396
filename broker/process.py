"""The broker process: one poll loop that carries messages between sockets and the core without reading array bytes."""

from __future__ import annotations

import errno
import gc
import logging
import math
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import zmq

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.batches.source import Peer
from headrace.broker.files.books_file import BooksFile
from headrace.broker.files.lifetime_file import LifetimeFile
from headrace.broker.files.rendezvous_file import RendezvousFile
from headrace.broker.files.report_file import ReportFile
from headrace.broker.files.state_file import read_broker_file
from headrace.broker.files.state_writer import StateWriter
from headrace.broker.ports.keyed_peers import KeyedPeers
from headrace.broker.ports.sockets import BrokerSockets, Socket, receive
from headrace.broker.ports.weights_relay import WeightsRelay
from headrace.broker.ports.worker_ports import WorkerPorts
from headrace.broker.reports.fleet_reports import FleetReports
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.reports.report import LIVE_S
from headrace.broker.reports.reporter import RedisReporter
from headrace.broker.reports.task_board import TaskBoard
from headrace.broker.sessions.core import BrokerCore
from headrace.broker.sessions.hello_rights import revocation
from headrace.broker.sessions.outbox import Send
from headrace.schemas.accounts.redis_keys import TOLD_SETTINGS
from headrace.schemas.basics.headrace_version import headrace_version
from headrace.schemas.basics.run_files import rendezvous_path
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.chunks.batch import read_batch_header
from headrace.schemas.credentials.key_files import fingerprint
from headrace.schemas.credentials.keys import BROKER, BrokerKeys, read_broker_keys
from headrace.schemas.errors import ConfigError, DecodeError
from headrace.schemas.frames.wire import (
    WEIGHTS_LIMITS,
    Buffer,
    MessageKind,
    WireLimits,
    WireMessage,
    decode_arrays,
    decode_header,
)
from headrace.schemas.messages import (
    LearnerHello,
    LearnerRows,
    LearnerWelcome,
    Message,
    RankHello,
    Reject,
    TeacherHello,
    WeightsAck,
    WeightsHeader,
    WeightsPull,
    WorkerWelcome,
    messages_to,
    read,
    read_hello,
)
from headrace.schemas.messages.message_base import MOST_DETAIL
from headrace.schemas.messages.shared_weights import SharedWeights
from headrace.schemas.messages.weights import MAPPED_BYTES, read_weights
from headrace.schemas.messages.weights_messages import MAPPING_TOPIC
from headrace.schemas.peers import sockets
from headrace.schemas.peers.advertised import advertised, host_to_advertise
from headrace.schemas.peers.heartbeat_interval import least_interval
from headrace.schemas.peers.rendezvous import Published
from headrace.schemas.settings.config import BrokerSection, FleetConfig

log = logging.getLogger(__name__)

_CONTROL = messages_to("broker")
_BURST, _TURN_S = 256, 0.02
"""Messages taken from one socket, and seconds, before the others get their turn and answers leave."""

_COLLECTIONS = (2_000, 20, 500)
"""Thresholds of the garbage collector's three generations. A full collection stops the loop for 75 ms where a broker
has a thousand workers, and finds nothing: the loop makes no cycles that live so long.
"""

_LIVE_REPORTS = 20
"""Reports that may fail in a row before gauges and all else of `LIVE_S` expire in Redis."""

_LONGEST_ENV = 200

_TICK_S = 0.05

_WORKER, _LEARNER = b"w", b"l"
"""A peer is its routing id after its role: routing ids of different ROUTER sockets may be equal."""


def run_broker(
    config: FleetConfig,
    *,
    fleet_id: str,
    run_dir: Path,
    redis_url: str | None,
    max_env_steps: int | None = None,
    alive: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM.

    Workers begin no fragment once the fleet has taken `max_env_steps` in its whole life. `alive` is called in each turn
    of the loop, as a sign of life. Raises `PortInUseError`, `RunDirError`, `ConfigError` or `KeysError` before it
    serves.
    """
    keys = read_broker_keys(Path(config.keys.dir)) if config.keys.dir else None
    gc.freeze()  # what was imported lives as long as this process, so the garbage collector need not scan it
    gc.set_threshold(*_COLLECTIONS)
    with stop_event() as stopping:  # before the broker's file says that it serves
        broker = open_broker(config, fleet_id, run_dir, redis_url, keys, max_env_steps)
        rendezvous = None
        try:
            rendezvous = _publish(config, run_dir, broker, keys)
            broker.core.observers.append(WorkerPorts(broker.core, rendezvous, broker.keyed.known))
            while not stopping.is_set():
                alive()
                broker.step()
        except BaseException:
            broker.close(in_order=False)
            if rendezvous is not None:
                rendezvous.close(stopped=False)
            raise
        broker.close()
        rendezvous.close(stopped=True)


def open_broker(
    config: FleetConfig,
    fleet_id: str,
    run_dir: Path,
    redis_url: str | None,
    keys: BrokerKeys | None = None,
    max_env_steps: int | None = None,
) -> Broker:
    """Return a broker with its features. A new feature is an observer in the list here: they hear in this order."""
    broker = Broker(config.broker, fleet_id, run_dir, keys, _limits_of(config, max_env_steps))
    books, lifetime = BooksFile(run_dir, fleet_id), LifetimeFile(run_dir, fleet_id)
    earlier = books.read(), lifetime.read()
    reporter = None
    if redis_url:
        live_s = max(LIVE_S, _LIVE_REPORTS * config.broker.report_interval_s)
        about = {
            "env": config.sampling.env[:_LONGEST_ENV],
            "version": headrace_version(),
            "settings": orjson.dumps({key: config.value_of(key) for key in TOLD_SETTINGS}).decode(),
        }
        weights_per_hour, told = config.redis.bytes_per_hour // 2, ReportFile(run_dir, fleet_id, live_s)
        reporter = RedisReporter(redis_url, fleet_id, books, live_s, weights_per_hour, about, lifetime, told)
    metrics, goal = FleetMetrics(broker.core), (config.fleet.until_return, max_env_steps)
    reports = FleetReports(metrics, *earlier, reporter, broker.keep_weights, config.broker.report_interval_s, goal)
    tasks = TaskBoard(broker.core, run_dir / "tasks.json", reports)
    broker.core.observers += [metrics, broker.keyed, reports, tasks, broker.state_writer]
    broker.state_writer.write()
    return broker


def _limits_of(fleet: FleetConfig, max_env_steps: int | None) -> BrokerLimits:
    config = fleet.broker
    return BrokerLimits(
        max_batch_bytes=config.max_batch_bytes,
        max_held_bytes=config.max_held_bytes,
        max_held_batches=config.max_held_batches,
        overflow=config.overflow,
        max_staleness=config.staleness_bound(),
        lease_s=config.lease_s,
        heartbeat_interval_s=least_interval(config.lease_s),
        synchronous=fleet.sampling.synchronous,
        workers=fleet.fleet.workers,
        max_env_steps=max_env_steps,
        brokers=config.count,
        index=config.index or 0,
        consumer_groups=config.consumer_groups,
    )


def _publish(config: FleetConfig, run_dir: Path, broker: Broker, keys: BrokerKeys | None) -> RendezvousFile:
    """Publish the broker's addresses, those that peers on other machines can reach."""
    path = rendezvous_path(config.fleet.rendezvous, run_dir)
    host = host_to_advertise(config.broker.host, config.broker.advertise)
    published = Published(
        fleet_id=broker.fleet_id,
        host=platform.node(),
        epoch=time.time_ns() // 1_000_000,
        endpoints=advertised(broker.sockets.endpoints.model_dump(), host),
        keys={BROKER: fingerprint(keys.public)} if keys is not None else {},
    )
    log.info("peers find it by %s: %s", path, published.endpoints)
    return RendezvousFile(path, published)


class Broker:
    """Sockets, core and relay of one broker, in one thread. Its features are the core's observers (`open_broker`)."""

    def __init__(
        self, config: BrokerSection, fleet_id: str, run_dir: Path, keys: BrokerKeys | None, limits: BrokerLimits
    ) -> None:
        before = read_broker_file(run_dir)
        if before is not None and before.fleet_id != fleet_id:
            detail = (
                f"{run_dir} belongs to fleet {before.fleet_id!r}, not {fleet_id!r}; name that, or another --run-dir"
            )
            raise ConfigError(detail, key="fleet.fleet_id")
        self.config = config
        self.fleet_id = fleet_id
        self.sockets = BrokerSockets(config, run_dir, before.endpoints if before else None, keys)
        self.relay = WeightsRelay()
        self._shared = SharedWeights(fleet_id)
        self._limits = WireLimits(payload_bytes=config.max_batch_bytes)
        limits = replace(limits, weights_endpoint=self.sockets.endpoints.weights)
        self.core = BrokerCore(fleet_id, limits, before.state() if before else BrokerState(), time.monotonic())
        self.keyed = KeyedPeers(self.core, self.sockets, keys)
        endpoints, interval_s = self.sockets.endpoints, config.report_interval_s
        self.state_writer = StateWriter(self.core, run_dir, fleet_id, endpoints, interval_s)
        self._held_back: dict[Peer, Send] = {}
        """The newest welcome of each peer that must not be sent before the state is in the file."""
        self._next_tick = 0.0
        self._poller = zmq.Poller()
        own = (self.sockets.workers, self.sockets.learners, self.sockets.weights)
        for socket in (*own, *self.sockets.auth.sockets):
            self._poller.register(socket, zmq.POLLIN)
        how = "with keys" if keys is not None else "without keys" if config.host else "to this user alone"
        log.info("serving fleet %s %s: %s", fleet_id, how, endpoints.model_dump())

    def step(self) -> None:
        """Wait a moment for messages, take a burst from each socket, and answer."""
        wait_s = max(0.0, min(_TICK_S, self.core.next_due - time.monotonic()))
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        for socket in (self.sockets.learners, self.sockets.workers):
            if socket in ready:
                self._drain(socket)
        if self.sockets.weights in ready:
            self._answer_subscribers()
        if any(socket in ready for socket in self.sockets.auth.sockets):
            self.sockets.auth.judge()
        now = time.monotonic()
        self._flush(now)
        if now >= self._next_tick:  # after the answers have left, since a report takes its time
            self._next_tick = now + _TICK_S
            self.core.tick(now)
            self._flush(now)

    def close(self, *, in_order: bool = True) -> None:
        """Send what is due, tell the observers, and close the sockets."""
        self._flush()
        for observer in self.core.observers:
            observer.close(in_order=in_order)
        self._shared.close()
        self.sockets.close()

    # -- taking messages ----------------------------------------------------------------------------------------------

    def _drain(self, socket: Socket) -> None:
        ends_at = time.monotonic() + _TURN_S
        for _ in range(_BURST):
            frames = receive(socket)
            if frames is None:
                return
            self._hear(socket, frames)
            if time.monotonic() > ends_at:
                return

    def _hear(self, socket: Socket, frames: list[zmq.Frame]) -> None:
        """Handle one message."""
        peer = (_WORKER if socket is self.sockets.workers else _LEARNER) + frames[0].bytes
        try:
            if self.core.knows(peer) or self._may_speak(socket, peer, frames[-1]):
                self._take(socket, peer, frames[1:])
        except DecodeError as error:
            self._refuse(peer, error)
        except Exception as error:  # noqa: BLE001  one peer's message must not end the process of all
            self._note_failure(peer, error)

    def _may_speak(self, socket: Socket, peer: Peer, frame: zmq.Frame) -> bool:
        """Return whether a peer that is not known yet may send messages.

        Reject one whose key is revoked, and end its connection.
        """
        key = self.keyed.introduce(socket, peer, frame)
        if key is None or not key.revoked:
            return True
        code, detail = revocation(key)
        self.core.refusals.note("a stranger", code, detail)
        self._send(peer, Reject(code=code, detail=detail))
        return False

    def _take(self, socket: Socket, peer: Peer, frames: list[zmq.Frame]) -> None:
        """Handle a message."""
        now, is_of_worker = time.monotonic(), socket is self.sockets.workers
        message: list[Any] = frames
        # A learner's weights may be larger than the largest batch.
        kind, header = decode_header(message, self._limits if is_of_worker else None)
        if kind is MessageKind.BATCH and is_of_worker:
            self.core.receive_batch(peer, read_batch_header(header), message, sum(map(len, message)), now)
        elif kind is MessageKind.WEIGHTS and not is_of_worker:
            self._take_weights(peer, header, frames)
        elif kind is MessageKind.LEARNER_ROWS and not is_of_worker:
            self.core.learners.on_rows(peer, read(LearnerRows, header))
        elif kind is MessageKind.WEIGHTS_PULL:
            pull = read(WeightsPull, header)
            unknown = Reject(code="unknown_peer", detail="say HELLO first", fatal=False)
            # A pull needs a session, which ends where the peer's key is revoked.
            self._send(peer, self.relay.part(pull) if self.core.knows(peer) else unknown)
        elif kind is MessageKind.HELLO:
            self._take_hello(socket, peer, read_hello(header), frames[-1], now)
        elif kind in _CONTROL and not (kind is MessageKind.TASKS and is_of_worker):
            self.core.receive(peer, read(_CONTROL[kind], header), now)
        else:
            raise DecodeError("unexpected_kind", f"{kind.name} is not for a broker")

    def _take_hello(self, socket: Socket, peer: Peer, hello: Message, frame: zmq.Frame, now: float) -> None:
        """Handle a HELLO.

        Reject one at the other role's port, where it can never succeed, and name the right endpoint.
        """
        if isinstance(hello, LearnerHello | RankHello | TeacherHello) is (socket is self.sockets.learners):
            self.core.receive(peer, hello, now, self.keyed.introduce(socket, peer, frame))
            return
        at, right = ("learner", "worker") if socket is self.sockets.learners else ("worker", "learner")
        endpoint = getattr(self.sockets.endpoints, right)
        detail = f"this is the broker's {at} endpoint; a {right} connects to {endpoint}"
        self._send(peer, Reject(code="wrong_endpoint", detail=detail))

    def _take_weights(self, peer: Peer, told: dict[str, Any], frames: list[zmq.Frame]) -> None:
        """Keep a version from the publisher, broadcast it, and acknowledge it. An older one is only acknowledged.

        An announced version is mapped from this machine's memory, if it is there. A part is merged into the version
        before it. Without that, the answer asks for the whole.
        """
        message: list[Buffer] = [frame.buffer for frame in frames]
        header, arrays = read_weights(
            WireMessage(MessageKind.WEIGHTS, told, decode_arrays(told, message, WEIGHTS_LIMITS, of_weights=True))
        )
        if not self.core.learners.may_publish(peer, header.version, self.core.workers.spaces):
            return
        is_news, part = header.version > self.relay.version, message if header.base else []
        is_mapped, whole = not arrays and is_news, message
        if part and is_news:
            whole, header = self.relay.merge(header, arrays), header.model_copy(update={"base": ""})
        if is_mapped:
            # Version and digest are claims: they name a file of this user's, whose header must say the same.
            found = self._shared.read(header.version, header.digest)
            whole = found[0] if found is not None else []
        if whole and self.keep_weights(header, whole, is_mapped=is_mapped):
            self._broadcast(part if part and self.relay.is_small_part(part) else [])
            if is_mapped:
                self._shared.remove_older(header.version)
            for observer in self.core.observers:
                observer.published(header.version, self.relay.frames)
        self._send(peer, WeightsAck(version=header.version, is_held=bool(whole)))

    def keep_weights(self, header: WeightsHeader, frames: list[Buffer], *, is_mapped: bool = False) -> bool:
        """Keep a checked version if it is newer. Write all but a small one to memory that workers here map.

        `is_mapped`: it lies there.
        """
        if header.version <= self.relay.version:
            return False
        if not is_mapped and sum(map(len, frames)) > MAPPED_BYTES and self._shared.write(header, frames):
            found = self._shared.read(header.version, header.digest)
            frames, is_mapped = (found[0], True) if found is not None else (frames, False)  # one copy stays
        self.relay.offer(header, frames)
        if is_mapped:
            self.relay.announce(header)
        self.core.published(header.version, time.monotonic())
        return True

    def _refuse(self, peer: Peer, error: DecodeError) -> None:
        """Tell a peer what was wrong.

        A peer whose batch cannot be read sends it again, and skips it after the third refusal.
        """
        source = self.core.workers.peers.get(peer)
        seq = source.accepted + 1 if source is not None else 0
        code = error.reason if error.reason == "version_mismatch" else "decode_error"
        self.core.refusals.note(self.core.name_of(peer), error.reason, error.detail)
        self._send(peer, Reject(code=code, detail=str(error), fatal=code == "version_mismatch" or seq == 0, seq=seq))

    def _note_failure(self, peer: Peer, error: Exception) -> None:
        """Count a message on which a handler failed. That is a bug of ours: log where, once for each kind of error."""
        kind = f"{type(error).__name__} in the broker"
        if not any(known == kind for _, known in self.core.refusals.counts):
            log.error("a message was dropped: the broker failed on it", exc_info=error)
        self.core.refusals.note(self.core.name_of(peer), kind, str(error)[:MOST_DETAIL])

    def _answer_subscribers(self) -> None:
        """Broadcast the last version for late subscribers.

        XPUB can only send to all; subscribers that have it ignore it.
        """
        greeted = False
        for _ in range(_BURST):
            try:
                frame = self.sockets.weights.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if frame.bytes.startswith(b"\1"):
                key = self.keyed.introduce(self.sockets.weights, b"", frame)
                greeted |= key is None or not key.revoked
        if greeted:
            self._broadcast()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _flush(self, now: float = math.inf) -> None:
        out = self.core.take_outbox(now)
        if not self.state_writer.has_written(now):
            welcomes = [message for message in out if isinstance(message.content, WorkerWelcome | LearnerWelcome)]
            self._held_back.update({message.peer: message for message in welcomes})
            out = [message for message in out if message not in welcomes]
        elif self._held_back:
            out = [*self._held_back.values(), *out]
            self._held_back = {}
        for message in out:
            self._send(message.peer, message.content)

    def _send(self, peer: Peer, content: Message | list[Buffer]) -> None:
        """Send a message without a copy. Drop one to a peer that is gone: it sends a HELLO when it reconnects."""
        socket = self.sockets.learners if peer.startswith(_LEARNER) else self.sockets.workers
        try:
            frames = content if isinstance(content, list) else content.frames()
            socket.send(peer[1:], sockets.MORE | sockets.DONTWAIT)
            sockets.send(socket, frames)
        except zmq.ZMQError as error:
            log.debug("peer %s has gone: %s", peer.hex(), error)
            if error.errno == errno.EHOSTUNREACH:
                self.core.gone(peer)

    def _broadcast(self, part: list[Buffer] | None = None) -> None:
        """Send the newest version, or to workers of other machines a `part` of it alone."""
        if self.relay.broadcast:
            sockets.send(self.sockets.weights, [MAPPING_TOPIC, *self.relay.to_mappers])
            sockets.send(self.sockets.weights, part or self.relay.broadcast)

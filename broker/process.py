"""The broker process: one poll loop that carries messages between sockets and the core without reading array bytes."""

from __future__ import annotations

import errno
import gc
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import zmq

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.batches.slot_owners import revocation
from headrace.broker.batches.source import Source
from headrace.broker.files.books_file import BooksFile
from headrace.broker.files.learner_rows_file import LearnerRowsFile
from headrace.broker.files.lifetime_file import LifetimeFile
from headrace.broker.files.rendezvous_file import RendezvousFile
from headrace.broker.files.state_file import read_broker_file, write_broker_file
from headrace.broker.ports.keyed_peers import KeyedPeers
from headrace.broker.ports.sockets import BrokerSockets, Socket, receive
from headrace.broker.ports.weights_relay import WeightsRelay
from headrace.broker.ports.worker_ports import WorkerPorts
from headrace.broker.redis.rows import ReceivedRow
from headrace.broker.reports.metrics import FleetMetrics
from headrace.broker.reports.report import LIVE_S
from headrace.broker.reports.reporter import RedisReporter
from headrace.broker.sessions.core import BrokerCore
from headrace.broker.sessions.outbox import Send
from headrace.schemas.accounts.redis_keys import TOLD_SETTINGS
from headrace.schemas.basics.headrace_version import headrace_version
from headrace.schemas.basics.run_files import rendezvous_path
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.chunks.batch import read_batch_header
from headrace.schemas.credentials.key_files import fingerprint
from headrace.schemas.credentials.keys import BROKER, BrokerKeys, read_broker_keys
from headrace.schemas.credentials.loopback_token import ServerToken, server_token
from headrace.schemas.errors import ConfigError, DecodeError, HeadraceError, machine_error
from headrace.schemas.frames.wire import (
    DEFAULT_LIMITS,
    Buffer,
    MessageKind,
    WireLimits,
    WireMessage,
    decode,
    decode_arrays,
    decode_header,
)
from headrace.schemas.messages import (
    LearnerHello,
    LearnerRows,
    LearnerWelcome,
    Message,
    Reject,
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
from headrace.schemas.messages.weights import read_weights
from headrace.schemas.messages.weights_messages import MAPPING_TOPIC
from headrace.schemas.peers import sockets
from headrace.schemas.peers.advertised import advertised, host_to_advertise
from headrace.schemas.peers.descriptors import source_of
from headrace.schemas.peers.heartbeat_interval import least_interval
from headrace.schemas.peers.port_watch import PortWatch
from headrace.schemas.peers.rendezvous import Published
from headrace.schemas.settings.config import REDIS_BYTES_PER_HOUR, BrokerSection, FleetConfig

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
_SAVED_WAIT_S = 1.0


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
    token = server_token(run_dir, asked=config.asks_token())  # workers' ports ask for it too
    own = None if config.broker.transport == "ipc" else token
    keys = read_broker_keys(Path(config.keys.dir)) if config.keys.dir else own
    gc.freeze()  # what was imported lives as long as this process, so the garbage collector need not scan it
    gc.set_threshold(*_COLLECTIONS)
    with stop_event() as stopping:  # before the broker's file says that it serves
        broker = Broker(
            config.broker,
            fleet_id,
            run_dir,
            redis_url,
            keys,
            synchronous=config.sampling.synchronous,
            workers=config.fleet.workers,
            max_env_steps=max_env_steps,
            weights_per_hour=config.redis.bytes_per_hour // 2,
            group=config.keys.group,
            env=config.sampling.env,
            settings={key: config.value_of(key) for key in TOLD_SETTINGS},
            until_return=config.fleet.until_return,
        )
        rendezvous = None
        try:
            rendezvous = _publish(config, run_dir, broker, keys)
            ports = WorkerPorts(rendezvous, keys.known if isinstance(keys, BrokerKeys) else None)
            while not stopping.is_set():
                alive()
                broker.step()
                ports.follow(broker.core, time.monotonic())
        except BaseException:
            broker.close(in_order=False)
            if rendezvous is not None:
                rendezvous.close(stopped=False)
            raise
        broker.close()
        rendezvous.close(stopped=True)


def _publish(
    config: FleetConfig, run_dir: Path, broker: Broker, keys: BrokerKeys | ServerToken | None
) -> RendezvousFile:
    """Publish the broker's addresses, those that peers on other machines can reach."""
    path = rendezvous_path(config.fleet.rendezvous, run_dir)
    host = host_to_advertise(config.broker.host, config.broker.advertise)
    published = Published(
        fleet_id=broker.fleet_id,
        host=platform.node(),
        epoch=time.time_ns() // 1_000_000,
        endpoints=advertised(broker.sockets.endpoints.model_dump(), host),
        keys={BROKER: fingerprint(keys.public)} if isinstance(keys, BrokerKeys) else {},
    )
    log.info("peers find it by %s: %s", path, published.endpoints)
    return RendezvousFile(path, published)


class Broker:
    """Sockets, core, relay and reporter of one broker, in one thread."""

    def __init__(
        self,
        config: BrokerSection,
        fleet_id: str,
        run_dir: Path,
        redis_url: str | None,
        keys: BrokerKeys | ServerToken | None = None,
        *,
        synchronous: bool = False,
        workers: int = 0,
        max_env_steps: int | None = None,
        weights_per_hour: int = REDIS_BYTES_PER_HOUR // 2,
        group: str = "",
        env: str = "",
        settings: Mapping[str, Any] | None = None,
        until_return: float | None = None,
    ) -> None:
        before = read_broker_file(run_dir)
        if before is not None and before.fleet_id != fleet_id:
            raise ConfigError(f"{run_dir} belongs to fleet {before.fleet_id!r}, not {fleet_id!r}", key="fleet.fleet_id")
        self.config = config
        self.run_dir = run_dir
        self.fleet_id = fleet_id
        self.sockets = BrokerSockets(config, run_dir, before.endpoints if before else None, keys)
        self._keyed = (
            KeyedPeers(self.sockets.auth, keys, self.sockets.watches) if isinstance(keys, BrokerKeys) else None
        )
        self.relay = WeightsRelay()
        self._shared = SharedWeights(fleet_id)
        self.metrics = FleetMetrics()
        limits = BrokerLimits(
            max_batch_bytes=config.max_batch_bytes,
            max_held_bytes=config.max_held_bytes,
            max_held_batches=config.max_held_batches,
            overflow=config.overflow,
            max_staleness=config.staleness_bound(),
            lease_s=config.lease_s,
            heartbeat_interval_s=least_interval(config.lease_s),
            weights_endpoint=self.sockets.endpoints.weights,
            synchronous=synchronous,
            workers=workers,
            max_env_steps=max_env_steps,
            brokers=config.count,
            index=config.index or 0,
            group=group,
        )
        self._goal = (
            math.inf if until_return is None else until_return,
            math.inf if max_env_steps is None else max_env_steps,
        )
        """Mean return and env steps that end the run."""
        self._goal_reported = False
        self._limits = WireLimits(payload_bytes=config.max_batch_bytes)
        state = before.state() if before else BrokerState()
        books_file = BooksFile(run_dir, fleet_id)
        ended = books_file.read()
        state.folded.update(ended.folded)
        self.core = BrokerCore(fleet_id, limits, state, time.monotonic())
        lifetime_file = LifetimeFile(run_dir, fleet_id)
        self._lifetime = lifetime_file.read()
        self.core.restore(ended.rows, {}, 0, self._lifetime.runner_state)
        self._counters_of_ended = ended.counters_of()
        self.metrics.continue_from(self._counters_of_ended)
        live_s = max(LIVE_S, _LIVE_REPORTS * config.report_interval_s)
        about = {
            "env": env[:_LONGEST_ENV],
            "version": headrace_version(),
            "settings": orjson.dumps(settings or {}).decode(),
        }
        self.reporter = (
            RedisReporter(
                redis_url,
                fleet_id,
                books_file,
                live_s,
                weights_per_hour,
                about,
                lifetime_file,
                LearnerRowsFile(run_dir, fleet_id),
            )
            if redis_url
            else None
        )
        self._restored = self.reporter is None or self._restore(_SAVED_WAIT_S)
        self.metrics.note_start(self.core.state.incarnations)
        self._written: BrokerState | None = None
        self._write_again = 0.0
        self._unwritten = ""
        """Why the state cannot be written now; "" where it can."""
        self._held_back: dict[bytes, Send] = {}
        """The newest welcome of each peer that must not be sent before the state is in the file."""
        self._noted_learner: bool | None = None
        self._next_report = 0.0
        self._next_tick = 0.0
        self._poller = zmq.Poller()
        own = (self.sockets.workers, self.sockets.learners, self.sockets.weights)
        for socket in (*own, *self.sockets.auth.sockets):
            self._poller.register(socket, zmq.POLLIN)
        self._write_state()
        without = "to this user alone" if config.transport == "ipc" else "without keys"
        how = {BrokerKeys: "with keys", ServerToken: "with a token"}.get(type(keys), without)
        log.info("serving fleet %s %s: %s", fleet_id, how, self.sockets.endpoints.model_dump())

    def step(self) -> None:
        """Wait a moment for messages, take a burst from each socket, and answer."""
        wait_s = max(0.0, min(_TICK_S, self.core.next_due - time.monotonic()))
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        for socket in (self.sockets.learners, self.sockets.workers):
            if socket in ready:
                self._drain(socket)
            else:
                self.sockets.watches[socket].emptied()
        if self.sockets.weights in ready:
            self._answer_subscribers()
        if any(socket in ready for socket in self.sockets.auth.sockets):
            self.sockets.auth.judge()
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self.core.tick(now)
            if self._keyed is not None:
                for peer, key in self._keyed.take_revoked():
                    self.metrics.note_revoked(key.name)
                    self.core.expel(peer, *revocation(key))
            if not self._goal_reported and self._is_at_goal():
                self._goal_reported, self._next_report = True, now  # the supervisor waits for this report
        self._flush(now)
        if now >= self._next_report:
            self._next_report = now + self.config.report_interval_s
            self._report(now)
            self._note_learner()

    def _is_at_goal(self) -> bool:
        mean_return, env_steps = self._goal
        if self.core.store.steps >= env_steps:
            return True
        return mean_return < math.inf and self.metrics.mean_return() >= mean_return

    def close(self, *, in_order: bool = True) -> None:
        """Send what is due, report a last time, and close the sockets.

        The last report says when the broker ended, if it stops `in_order`.
        """
        self._flush()
        self._report(time.monotonic(), ended_unix_s=time.time() if in_order else None)
        if self.reporter is not None:
            self.reporter.close(2.0)
        self._shared.close()
        self.sockets.close()

    # -- taking messages ----------------------------------------------------------------------------------------------

    def _drain(self, socket: Socket) -> None:
        watch, ends_at = self.sockets.watches[socket], time.monotonic() + _TURN_S
        for _ in range(_BURST):
            frames = receive(socket)
            if frames is None:
                watch.emptied()
                return
            self._hear(socket, watch, frames)
            if time.monotonic() > ends_at:
                return

    def _hear(self, socket: Socket, watch: PortWatch, frames: list[zmq.Frame]) -> None:
        """Handle one message. Note whether its sender has introduced itself."""
        peer, nbytes = frames[0].bytes, sum(len(frame) for frame in frames[1:])
        account, tagged = watch.heard(source_of(frames[-1]), peer, nbytes), _tag(socket, self.sockets.learners, peer)
        try:
            if account.known or self._may_speak(socket, peer, frames[-1]):
                self._take(socket, peer, frames[1:])
        except DecodeError as error:
            self._refuse(socket, peer, error)
        except Exception as error:  # noqa: BLE001  one peer's message must not end the process of all
            self._note_failure(tagged, error)
        account.known = account.known or self.core.knows(tagged)

    def _may_speak(self, socket: Socket, peer: bytes, frame: zmq.Frame) -> bool:
        """Return whether a peer that is not known yet may send messages.

        Reject one whose key is revoked, and end its connection.
        """
        key = self._keyed.introduce(socket, _tag(socket, self.sockets.learners, peer), frame) if self._keyed else None
        if key is None or not key.revoked:
            return True
        code, detail = revocation(key)
        self.core.refusals.note("a stranger", code, detail)
        self._send(socket, peer, Reject(code=code, detail=detail).frames())
        return False

    def _take(self, socket: Socket, peer: bytes, frames: list[zmq.Frame]) -> None:
        """Handle a message."""
        now = time.monotonic()
        # A learner's weights may be larger than the largest batch.
        limits = self._limits if socket is self.sockets.workers else DEFAULT_LIMITS
        kind, header = decode_header([frame.buffer for frame in frames], limits)
        if kind is MessageKind.BATCH and socket is self.sockets.workers:
            self._take_batch(peer, header, frames, now)
        elif kind is MessageKind.WEIGHTS and socket is self.sockets.learners:
            self._take_weights(peer, header, frames)
        elif kind is MessageKind.LEARNER_ROWS and socket is self.sockets.learners:
            self._take_rows(peer, read(LearnerRows, header))
        elif kind is MessageKind.WEIGHTS_PULL:
            self._send_weights(socket, peer, read(WeightsPull, header))
        elif kind is MessageKind.HELLO:
            self._take_hello(socket, peer, read_hello(header), frames[-1], now)
        elif kind in _CONTROL:
            self.core.receive(_tag(socket, self.sockets.learners, peer), read(_CONTROL[kind], header), now)
        else:
            raise DecodeError("unexpected_kind", f"{kind.name} is not for a broker")

    def _take_hello(self, socket: Socket, peer: bytes, hello: Message, frame: zmq.Frame, now: float) -> None:
        """Handle a HELLO.

        Reject one at the other role's port, where it can never succeed, and name the right endpoint.
        """
        if isinstance(hello, LearnerHello) is (socket is self.sockets.learners):
            tagged = _tag(socket, self.sockets.learners, peer)
            key = self._keyed.introduce(socket, tagged, frame) if self._keyed is not None else None
            self.core.receive(tagged, hello, now, key)
            return
        at, right = ("learner", "worker") if socket is self.sockets.learners else ("worker", "learner")
        endpoint = getattr(self.sockets.endpoints, right)
        detail = f"this is the broker's {at} endpoint; a {right} connects to {endpoint}"
        self._send(socket, peer, Reject(code="wrong_endpoint", detail=detail).frames())

    def _take_batch(self, peer: bytes, header: dict[str, Any], frames: list[zmq.Frame], now: float) -> None:
        typed = read_batch_header(header)
        nbytes = sum(len(frame) for frame in frames)
        if self.core.receive_batch(_WORKER + peer, typed, frames, nbytes, now):  # type: ignore[arg-type]
            self.metrics.observe(typed, nbytes, now, self.core.weights)

    def _take_weights(self, peer: bytes, told: dict[str, Any], frames: list[zmq.Frame]) -> None:
        """Keep a version from the publisher, broadcast it, and acknowledge it. An older one is only acknowledged.

        An announced version is mapped from this machine's memory, if it is there.
        """
        message: list[Buffer] = [frame.buffer for frame in frames]
        header, arrays = read_weights(WireMessage(MessageKind.WEIGHTS, told, decode_arrays(told, message)))
        if not self.core.may_publish(_LEARNER + peer, header.version):
            return
        is_mapped = not arrays and header.version > self.relay.version
        whole = self._mapped(header) if is_mapped else message
        if whole is not None and self._keep_weights(header, whole, is_mapped=is_mapped):
            self._broadcast()
            if is_mapped:
                self._shared.remove_older(header.version)
            if self.reporter is not None:
                self.reporter.offer_weights(header.version, self.relay.frames)
        ack = WeightsAck(version=header.version, is_held=whole is not None)
        self._send(self.sockets.learners, peer, ack.frames())

    def _mapped(self, header: WeightsHeader) -> list[Buffer] | None:
        """Return the frames of a version that a publisher has written to this machine's memory; None if there is none.

        Version and digest are claims. They name a file of this user's, and its header must say the same.
        """
        found = self._shared.read(header.version, header.digest)
        return found[0] if found is not None else None

    def _keep_weights(self, header: WeightsHeader, frames: list[Buffer], *, is_mapped: bool = False) -> bool:
        """Keep a checked version if it is newer. Write all but a small one also to memory that workers here map.

        `is_mapped`: it lies there.
        """
        if not self.relay.offer(header, frames):
            return False
        if is_mapped or (self.relay.is_to_be_mapped and self._shared.write(header, frames)):
            self.relay.announce(header)
        self.core.published(header.version, time.monotonic())
        return True

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

        A peer whose batch cannot be read sends it again, and skips it after the third refusal.
        """
        tagged = _tag(socket, self.sockets.learners, peer)
        seq = self.core.next_seq(tagged)
        code = error.reason if error.reason == "version_mismatch" else "decode_error"
        self.core.refusals.note(self.core.name_of(tagged), error.reason, error.detail)
        reject = Reject(code=code, detail=str(error), fatal=code == "version_mismatch" or seq == 0, seq=seq)
        self._send(socket, peer, reject.frames())

    def _note_failure(self, tagged: bytes, error: Exception) -> None:
        """Count a message on which a handler failed. That is a bug of ours: log where, once for each kind of error."""
        kind = f"{type(error).__name__} in the broker"
        if not any(known == kind for _, known in self.core.refusals.counts):
            log.error("a message was dropped: the broker failed on it", exc_info=error)
        self.core.refusals.note(self.core.name_of(tagged), kind, str(error)[:MOST_DETAIL])

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
                key = self._keyed.introduce(self.sockets.weights, b"", frame) if self._keyed is not None else None
                greeted |= key is None or not key.revoked
        if greeted:
            self._broadcast()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _flush(self, now: float = math.inf) -> None:
        out = self.core.take_outbox(now)
        if self.core.state != self._written and not self._has_written(now):
            welcomes = [message for message in out if isinstance(message.content, WorkerWelcome | LearnerWelcome)]
            self._held_back.update({message.peer: message for message in welcomes})
            out = [message for message in out if message not in welcomes]
        elif self._held_back:
            out = [*self._held_back.values(), *out]
            self._held_back = {}
        for message in out:
            self._deliver(message)

    def _has_written(self, now: float) -> bool:
        """Write the state. If that fails, serve those who have joined, and try again after a while.

        Whoever joins waits: numbers that the file lacks would be given out twice.
        """
        if now < self._write_again:
            return False
        try:
            self._write_state()
        except HeadraceError as error:
            if not self._held_back:
                log.error("%s; until then nobody can join", error)
            self._unwritten = str(error)
            self._write_again = time.monotonic() + self.config.report_interval_s
            return False
        self._unwritten = ""
        return True

    def _why_no_peer_joins(self) -> str:
        """Return why a peer that comes cannot join; "" where it can.

        Without a free descriptor libzmq accepts no connection, and tells nobody.
        """
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            return str(machine_error(error) or error)
        return self._unwritten

    def _deliver(self, message: Send) -> None:
        socket = self.sockets.learners if message.peer.startswith(_LEARNER) else self.sockets.workers
        content = message.content if isinstance(message.content, list) else message.content.frames()
        self._send(socket, message.peer[1:], content)

    def _send(self, socket: Socket, peer: bytes, frames: list[Any]) -> None:
        """Send frames without a copy. Drop a message to a peer that is gone: it sends a HELLO when it reconnects."""
        try:
            sockets.send(socket, [peer, *frames])
        except zmq.ZMQError as error:
            log.debug("peer %s has gone: %s", peer.hex(), error)
            if error.errno == errno.EHOSTUNREACH:
                self.core.gone(_tag(socket, self.sockets.learners, peer))

    def _send_weights(self, socket: Socket, peer: bytes, pull: WeightsPull) -> None:
        """Answer a peer that pulls weights. It must have a session, which ends where its key is revoked."""
        if self.core.knows(_tag(socket, self.sockets.learners, peer)):
            self._send(socket, peer, self.relay.part(pull))
        else:
            self._send(socket, peer, Reject(code="unknown_peer", detail="say HELLO first", fatal=False).frames())

    def _broadcast(self) -> None:
        if self.relay.broadcast:
            sockets.send(self.sockets.weights, [MAPPING_TOPIC, *self.relay.to_mappers])
            sockets.send(self.sockets.weights, self.relay.broadcast)

    # -- what outlives the process ------------------------------------------------------------------------------------

    def _write_state(self) -> None:
        state, has_learner = self.core.state, self._noted_learner
        write_broker_file(self.run_dir, self.fleet_id, self.sockets.endpoints, state, has_learner)
        self._written = replace(state, incarnations=dict(state.incarnations), owners=dict(state.owners))

    def _note_learner(self) -> None:
        """Note in the file whether a learner is connected, since the supervisor must know it while Redis is away.

        On a full disk, try again after the next report.
        """
        before, self._noted_learner = self._noted_learner, self.core.has_learner
        if before is self._noted_learner:
            return
        try:
            self._write_state()
        except HeadraceError as error:
            self._noted_learner = before
            log.debug("whether a learner is connected cannot be noted now: %s", error)

    def _report(self, now: float, ended_unix_s: float | None = None) -> None:
        def counters_of(source: Source) -> dict[str, int]:
            return self.metrics.counters_of(source, now)

        if self.reporter is None:
            rows = [source.ledger_row() for source in self.core.take_changed() if source.closed]
            self.core.stored((row for row in rows if row is not None), durable=False)
            self.metrics.forget(self.core.fold(counters_of))
            return
        if not self._restored:
            self._restored = self._restore(0.0)
        if self._restored:
            self.core.stored(self.reporter.take_closed_rows())
            self.metrics.forget(self.core.fold(counters_of))
        blocked = self._why_no_peer_joins()
        report = replace(self.metrics.report(self.core, now), joins_blocked=blocked, ended_unix_s=ended_unix_s)
        if not self._restored:  # what runners counted before is not known yet, and must not be written over
            report = replace(report, runner_state={}, metric_sums=None, env_errors=None)
        self.reporter.offer(report)
        self.core.rows_stored(self.reporter.rows_stored)

    def _restore(self, wait_s: float) -> bool:
        """Go on from what Redis remembers. Return whether Redis answered."""
        saved = self.reporter.take_saved(wait_s=wait_s) if self.reporter else None
        if saved is None:
            return False
        self.core.restore(saved.rows.values(), saved.incarnations, saved.lease_epoch, saved.runner_state, saved.folded)
        known, is_folded = self._counters_of_ended, self.core.store.is_folded
        news = {key: own for key, own in saved.counters.items() if key not in known and key[1] and not is_folded(*key)}
        self.metrics.continue_from(news)
        self.metrics.workers.go_on_from(saved.metric_sums or self._lifetime.metric_sums)
        self.metrics.env_errors.go_on_from(saved.env_errors or self._lifetime.env_errors)
        if saved.weights is not None:
            try:
                header, _ = read_weights(decode(saved.weights.frames))
            except DecodeError as error:
                log.warning("the weights in Redis are not usable: %s", error)
            else:
                self._keep_weights(header, list(saved.weights.frames))
        return True


_WORKER = b"w"
_LEARNER = b"l"


def _tag(socket: Socket, learners: Socket, peer: bytes) -> bytes:
    """Prefix a peer's routing id with its role: routing ids of different ROUTER sockets may be equal."""
    return (_LEARNER if socket is learners else _WORKER) + peer

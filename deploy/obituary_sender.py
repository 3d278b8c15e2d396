"""Sender of obituaries: it tells the broker of every worker that ended, and of the content of its recorder.

It repeats an obituary until the broker acknowledges it. A recorder file is deleted only once its obituary is
acknowledged *and* every batch of that life that the broker has accepted is settled. Until then the broker's memory and
this file are all that is known of them. So the files themselves list what must still be told, also for the next
supervisor when this one dies. A restarted broker may have forgotten, and is told everything again: a repeated obituary
is only acknowledged.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from pathlib import Path

import zmq

from headrace.deploy.event_loop import EventLoop, Timer
from headrace.deploy.exit_record import ExitRecord
from headrace.deploy.recorders import Life, recorder_path, recorders_in
from headrace.schemas.errors import DecodeError, ExitCode, KeysRefusedError
from headrace.schemas.handshakes import CLIENT_EVENTS, Handshakes
from headrace.schemas.keys import ClientKeys
from headrace.schemas.ledger import Discard, Drop, Settled, WorkerTotals
from headrace.schemas.messages import Ack, Obituary, Reject, SupervisorHello, read
from headrace.schemas.recorder import Reading, read_recorder
from headrace.schemas.wire import MessageKind, decode_header

log = logging.getLogger("headrace.supervisor")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


def write_obituary(recorders: Path, slot: int, incarnation: int, reason: str) -> Obituary:
    """Write the obituary of a life from its recorder.

    Without a recorder the life ended before it stepped, since a worker makes no step before its recorder exists. So all
    zeros is a measurement too.
    """
    reading = read_recorder(recorder_path(recorders, slot, incarnation))
    if reading is None:
        return Obituary(slot=slot, incarnation=incarnation, totals=WorkerTotals(), settled=Settled(), reason=reason)
    return Obituary(
        slot=slot,
        incarnation=incarnation,
        totals=reading.totals,
        settled=reading.settled,
        window=reading.window,
        reason=reason,
    )


@dataclass
class _Death:
    obituary: Obituary
    known: bool = False
    """True once the running broker has acknowledged the obituary."""
    settled: bool = False
    """True once all batches that the broker accepted of this life are settled."""
    pause_s: float = FIRST_PAUSE_S
    timer: Timer | None = None

    def stop_sending(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class ObituarySender:
    """Sends obituaries to the broker's worker endpoint, and repeats each until it is acknowledged.

    A broker that restarts forgets its peers, and a DEALER does not notice: each obituary brings its own HELLO.
    """

    def __init__(
        self, loop: EventLoop, endpoint: str, fleet_id: str, recorders: Path, keys: ClientKeys | None = None
    ) -> None:
        self._loop = loop
        self._recorders = recorders
        self._hello = SupervisorHello(fleet_id=fleet_id, token=secrets.token_hex(8)).frames()
        self._deaths: dict[Life, _Death] = {}
        """All deaths since this supervisor began, since any later broker may have to be told of them."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IMMEDIATE, 1)  # without a broker no messages pile up in the socket
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.set(zmq.HEARTBEAT_IVL, 2000)
        for name, value in (keys.options() if keys is not None else {}).items():
            self._socket.setsockopt(getattr(zmq, name), value)
        self._handshakes = Handshakes(endpoint, keys)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(CLIENT_EVENTS)
        self._socket.connect(endpoint)
        loop.watch(self._socket, self._receive)
        loop.watch(self._monitor, self._observe_handshakes)

    def send(self, obituary: Obituary) -> None:
        """Send an obituary now and until it is acknowledged.

        A life that was told of before keeps its first obituary.
        """
        life = (obituary.slot, obituary.incarnation)
        if life not in self._deaths:
            self._deaths[life] = _Death(obituary)
            self._send(life)

    def resend(self, *, unsettled_only: bool = False) -> None:
        """Send obituaries again, to a restarted broker, or to learn what has been settled since."""
        for life, death in self._deaths.items():
            if death.known and not (unsettled_only and death.settled):
                death.known, death.pause_s = False, FIRST_PAUSE_S
                death.stop_sending()
                self._send(life)

    def send_left_over(self) -> None:
        """Send obituaries of lives whose recorders an earlier supervisor left, unless the process still lives."""
        for life, path in recorders_in(self._recorders):
            reading = read_recorder(path)
            if reading is None or not _is_written_to(path, reading.pid):
                self.send(write_obituary(self._recorders, *life, _reason_left_over(reading)))

    def all_acknowledged(self) -> bool:
        """Return whether the broker that runs now knows of every death."""
        return all(death.known for death in self._deaths.values())

    def close(self) -> None:
        """Stop sending. Lives that are untold or unsettled stay in their recorder files for the next supervisor."""
        for death in self._deaths.values():
            death.stop_sending()
        for socket in (self._socket, self._monitor):
            self._loop.forget(socket)
            socket.close()

    def _send(self, life: Life) -> None:
        death = self._deaths[life]
        try:
            self._socket.send_multipart(self._hello, zmq.NOBLOCK)
            self._socket.send_multipart(death.obituary.frames(), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("no broker to tell of the end of worker %d incarnation %d", *life)
        death.timer = self._loop.call_later(death.pause_s, lambda: self._send(life))
        death.pause_s = min(2 * death.pause_s, LONGEST_PAUSE_S)

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                kind, header = decode_header(frames)
                if kind is MessageKind.ACK:
                    ack = read(Ack, header)
                    if ack.closed:
                        self._on_ack(ack)
                elif kind is MessageKind.REJECT:
                    log.warning("the broker refuses an obituary: %s", read(Reject, header).detail)
            except DecodeError as error:
                log.warning("the broker sent something unreadable: %s", error)

    def _observe_handshakes(self) -> None:
        try:
            self._handshakes.observe(self._monitor.recv_multipart())
        except KeysRefusedError as error:
            log.error("%s; obituaries not sent stay in the recorder files", error)

    def _on_ack(self, ack: Ack) -> None:
        life = (ack.slot, ack.incarnation)
        death = self._deaths.get(life)
        if death is None:
            return
        death.known = True
        death.stop_sending()
        if ack.settled.seq > death.obituary.settled.seq:  # so the next broker also learns what this one knew
            window = [batch for batch in death.obituary.window if batch.seq > ack.settled.seq]
            death.obituary = death.obituary.model_copy(update={"settled": ack.settled, "window": window})
        if ack.settled.seq >= ack.accepted:
            death.settled = True
            recorder_path(self._recorders, *life).unlink(missing_ok=True)


def reason_of(record: ExitRecord | None) -> str:
    """Return the obituary's reason for a worker with this exit record."""
    reasons: dict[int, str] = {ExitCode.OK: "shutdown", ExitCode.FENCED: "fenced"}
    return reasons.get(record.exit_code, "worker_killed") if record is not None else "worker_killed"


def _reason_left_over(reading: Reading | None) -> str:
    """Return the reason for a life under an earlier supervisor.

    Either a broker had accepted everything and is gone too, or the worker was killed.
    """
    if reading is not None and not reading.totals.open and reading.accepted >= reading.totals.seq:
        return Drop.BROKER_LOST
    return Discard.WORKER_KILLED


def _is_written_to(recorder: Path, pid: int) -> bool:
    """Return whether the writer lives: it has the file mapped, unlike another process that was given its pid."""
    try:
        return str(recorder.resolve()) in Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:
        return True
    except OSError:
        return False

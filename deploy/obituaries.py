"""Tells the broker of every worker that ended, and of what its recorder holds, until the broker says it knows.

A recorder file is deleted only once its obituary is acknowledged. So the files themselves are the list of what is still
to be told, also for the next supervisor when this one dies.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import zmq

from headrace.deploy.loop import Loop, Timer
from headrace.deploy.silence import recorder_path
from headrace.schemas.errors import DecodeError
from headrace.schemas.ledger import Settled, WorkerTotals
from headrace.schemas.messages import Ack, Obituary, Reject, SupervisorHello, read
from headrace.schemas.recorder import read_recorder
from headrace.schemas.wire import MessageKind, decode_header

log = logging.getLogger("headrace.supervisor")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
_RECORDER = re.compile(r"worker-(\d+)-(\d+)\.rec")

Life = tuple[int, int]
"""(slot, incarnation)."""


def write_obituary(recorders: Path, slot: int, incarnation: int, reason: str) -> Obituary:
    """What became of a life, from its recorder. Without one it ended before it stepped: all zeros, and that is measured
    too, since a worker makes no step before its recorder stands."""
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
class _Untold:
    obituary: Obituary
    pause_s: float = FIRST_PAUSE_S
    timer: Timer | None = None


class Obituaries:
    """Sends obituaries to the broker's worker endpoint, each again and again until it is acknowledged.

    A broker that restarts forgets whom it talked to, and a DEALER does not notice: each obituary brings its own HELLO.
    """

    def __init__(self, loop: Loop, endpoint: str, fleet_id: str, recorders: Path) -> None:
        self._loop = loop
        self._recorders = recorders
        self._hello = SupervisorHello(fleet_id=fleet_id, token=secrets.token_hex(8)).frames()
        self._untold: dict[Life, _Untold] = {}
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IMMEDIATE, 1)  # while there is no broker nothing piles up in the socket
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.set(zmq.HEARTBEAT_IVL, 2000)
        self._socket.connect(endpoint)
        loop.watch(self._socket, self._receive)

    def tell(self, obituary: Obituary) -> None:
        """Send it now and until it is acknowledged; a life that is already being told of keeps its first obituary."""
        life = (obituary.slot, obituary.incarnation)
        if life not in self._untold:
            self._untold[life] = _Untold(obituary)
            self._send(life)

    def tell_left_over(self) -> None:
        """Tell of the lives whose recorders an earlier supervisor left behind, unless the process still lives."""
        for path in sorted(self._recorders.iterdir()):
            match = _RECORDER.fullmatch(path.name)
            if match is None:
                continue
            reading = read_recorder(path)
            if reading is None or not _lives(reading.pid):
                self.tell(write_obituary(self._recorders, int(match[1]), int(match[2]), "worker_killed"))

    def all_told(self) -> bool:
        """True when the broker knows of every death."""
        return not self._untold

    def close(self) -> None:
        """Stop telling; what is untold stays in its recorder file for the next supervisor."""
        for untold in self._untold.values():
            if untold.timer is not None:
                untold.timer.cancel()
        self._loop.forget(self._socket)
        self._socket.close()

    def _send(self, life: Life) -> None:
        untold = self._untold[life]
        try:
            self._socket.send_multipart(self._hello, zmq.NOBLOCK)
            self._socket.send_multipart(untold.obituary.frames(), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("no broker to tell of the end of worker %d incarnation %d", *life)
        untold.timer = self._loop.call_later(untold.pause_s, lambda: self._send(life))
        untold.pause_s = min(2 * untold.pause_s, LONGEST_PAUSE_S)

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
                        self._told((ack.slot, ack.incarnation))
                elif kind is MessageKind.REJECT:
                    log.warning("the broker refuses an obituary: %s", read(Reject, header).detail)
            except DecodeError as error:
                log.warning("the broker sent something unreadable: %s", error)

    def _told(self, life: Life) -> None:
        untold = self._untold.pop(life, None)
        if untold is None:
            return
        if untold.timer is not None:
            untold.timer.cancel()
        recorder_path(self._recorders, *life).unlink(missing_ok=True)


def reason_of(returncode: int, fenced: int) -> str:
    """The obituary's reason for a worker's return code."""
    if returncode == 0:
        return "shutdown"
    return "fenced" if returncode == fenced else "worker_killed"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

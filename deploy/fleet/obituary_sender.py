"""Sender of obituaries: it tells the broker of every worker that ended, and of the content of its recorder.

When the fleet is drained, it also asks the broker to pause workers of other supervisors, or without one.

The sender repeats an obituary until the broker acknowledges it. It keeps the recorder file until it has read in Redis
that the books of that life are final and that a learner has taken its end. Until then only the file would survive the
broker. If this supervisor dies, the next one finds the same files and sends their obituaries. A restarted broker may
have forgotten obituaries, so the sender sends all of them again. The broker acknowledges only obituaries that it knows.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import zmq

from headrace.broker.files.books_file import EndedLives
from headrace.deploy.process.event_loop import EventLoop, Timer
from headrace.deploy.process.exit_record import ExitRecord
from headrace.deploy.process.recorders import Life, covers, is_written_to, recorder_path, recorders_in
from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.accounts.folded_lives import FoldedLives
from headrace.schemas.accounts.ledger import Discard, Drop, LedgerRow, Settled, WorkerTotals
from headrace.schemas.accounts.recorder import Reading, is_unborn, read_recorder
from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.credentials.keys import ClientKeys
from headrace.schemas.errors import DecodeError, ExitCode, KeysRefusedError, is_there
from headrace.schemas.frames.wire import decode_header
from headrace.schemas.messages import Ack, Obituary, Reject, SupervisorHello, messages_to, read
from headrace.schemas.peers import sockets
from headrace.schemas.peers.handshakes import CLIENT_EVENTS, Handshakes

log = logging.getLogger("headrace.supervisor")

_CONTROL = messages_to("supervisor")

NO_LIVES: Mapping[int, FoldedLives] = MappingProxyType({})

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
_REPEAT_PAUSE_S = 1.0


def write_obituary(recorders: Path, slot: int, incarnation: int, reason: str) -> Obituary:
    """Write the obituary of a life from its recorder.

    Without a recorder all counts are zeros. Either the life took no step, since a worker creates its recorder before
    its first step, or the file was removed: the broker then takes the steps that the worker had told it of.
    """
    reading = read_recorder(recorder_path(recorders, slot, incarnation))
    totals, settled = (reading.totals, reading.settled) if reading is not None else (WorkerTotals(), Settled())
    window = reading.window if reading is not None else []
    return Obituary(slot=slot, incarnation=incarnation, totals=totals, settled=settled, window=window, reason=reason)


@dataclass
class _Death:
    obituary: Obituary
    known: bool = False
    """True once the running broker has acknowledged the obituary."""
    pause_s: float = FIRST_PAUSE_S
    timer: Timer | None = None

    def stop_sending(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class ObituarySender:
    """Sends obituaries to the broker's worker endpoint, and repeats each until it is acknowledged.

    A broker that restarts forgets its peers, and a DEALER does not notice: each obituary brings its own HELLO.

    A supervisor that does not read Redis repeats an obituary until the broker says that the books of that life are
    final. Then the sender deletes its recorder.

    books: what Redis has at the start.
    """

    def __init__(
        self,
        loop: EventLoop,
        endpoint: str,
        fleet_id: str,
        recorders: Path,
        keys: ClientKeys | None = None,
        *,
        reads_redis: bool = True,
        books: Snapshot | None = None,
    ) -> None:
        self._loop = loop
        self._books = books or Snapshot()
        self._reads_redis = reads_redis
        self._endpoint, self._keys = endpoint, keys
        self._recorders = recorders
        self._hello = SupervisorHello(fleet_id=fleet_id, token=secrets.token_hex(8))
        self._pause_timer: Timer | None = None
        self._deaths: dict[Life, _Death] = {}
        """Deaths that a later broker may have to be told of: those since this supervisor began that are not folded."""
        self._not_stored: set[Life] = set()
        """Deaths of which this supervisor has not read the final books in Redis yet."""
        self._unreadable: set[Life] = set()
        self._unread: set[Life] = set()
        """Lives that have ended, and whose recorders could not be read yet."""
        self._recorded: set[Life] = set()
        """Lives that are known to have had recorders, which were not deleted."""
        self._warnings = CountedWarnings(log)
        self._seen_living: set[Life] = set()
        """Lives that no supervisor has, and that once were seen to live on this machine."""
        # A context of its own: terminating it also frees its I/O thread from a monitor socket without a reader.
        self._handshakes = Handshakes(endpoint, "supervisor", keys)
        self._own = sockets.OwnSockets(zmq.Context(), f"a supervisor's connection to {endpoint}", 0.0)
        # IMMEDIATE: without a broker, no messages queue in the socket
        options = {"LINGER": 0, "IMMEDIATE": 1, "RECONNECT_IVL_MAX": 1000, "HEARTBEAT_IVL": 2000}
        self._socket: zmq.Socket[bytes] = self._own.open(zmq.DEALER, {**options, **self._handshakes.options()})
        self._monitor: zmq.Socket[bytes] = self._own.monitor(self._socket, CLIENT_EVENTS)
        self._socket.connect(endpoint)
        loop.watch(self._socket, self._receive)
        loop.watch(self._monitor, self._observe_handshakes)

    def send(self, obituary: Obituary) -> None:
        """Send an obituary now and until it is acknowledged.

        A life that already has an obituary keeps it.
        """
        life = (obituary.slot, obituary.incarnation)
        if life not in self._deaths:
            reading = read_recorder(recorder_path(self._recorders, *life))
            if reading is None and not obituary.totals.stepped:
                self._note_unrecorded(life, has_stepped=life in self._recorded)
            else:
                log.info("%s", _last_words(obituary, reading.accepted if reading is not None else 0))
            self._deaths[life] = _Death(obituary)
            self._not_stored.add(life)
            self._seen_living.discard(life)
            self._send(life)

    def _note_unrecorded(self, life: Life, *, has_stepped: bool) -> None:
        """Log that a life has left no recorder, and no number of steps, which the deep audit would take for true."""
        if has_stepped:
            self._recorded.add(life)
            lost = (
                "the recorder of worker %d incarnation %d is lost: the broker knows only the steps that it was told of"
            )
            log.warning(lost, *life)
        else:
            log.info("worker %d incarnation %d left no recorder, as one that ends before its first step", *life)

    def send_end(self, slot: int, incarnation: int, reason: str) -> None:
        """Send the obituary of a life as soon as its recorder can be read.

        A recorder that this supervisor can never read is left to the next one.
        """
        life = slot, incarnation
        try:
            obituary = write_obituary(self._recorders, slot, incarnation, reason)
        except OSError as error:
            self._warnings.warn(b"", f"end of {life}", f"the end of worker {slot} waits: its recorder: {error}")
            self._unread.add(life)
            self._loop.call_later(LONGEST_PAUSE_S, lambda: self.send_end(slot, incarnation, reason))
        else:
            self._unread.discard(life)
            self.send(obituary)

    def resend(self) -> None:
        """Send all obituaries again, to a restarted broker."""
        for life, death in self._deaths.items():
            if death.known:
                death.known, death.pause_s = False, FIRST_PAUSE_S
                death.stop_sending()
                self._send(life)

    def pause_workers(self) -> None:
        """Tell the broker that the fleet is drained: workers begin no further fragment.

        Repeat it until `close`, for a broker that restarts meanwhile.
        """
        self._hello = self._hello.model_copy(update={"draining": True})
        self._send_pause()

    def send_left_over(self) -> None:
        """Send obituaries of lives whose recorders an earlier supervisor left, unless the process still lives."""
        self._send_ended(lambda life: True, ())

    def send_ended(self, own: Container[Life]) -> None:
        """Send obituaries of workers that were seen alive on this machine, have ended, and had no supervisor.

        `own` has the lives of this supervisor's children. Skip a recorder whose writer was never seen alive here: its
        worker may live on another machine that shares the folder.
        """
        self._send_ended(self._seen_living.__contains__, own)

    def send_unrecorded(self, ended: EndedLives, settled: Mapping[Life, Settled], slots: Container[int]) -> None:
        """Send obituaries of lives in these `slots` that are not over in the books, and whose recorders are lost.

        A life is over once its books are closed and a learner has taken its end. The obituaries report what `books` in
        Redis, `ended` in books.json and the learner's position, `settled`, prove. Steps after a life's last report stay
        unknown. A recorder of zeros is lost too: a file system that was aborted leaves it. Call it before
        `send_left_over`, and before any of the slots has a new life.
        """
        rows = {**self._books.rows, **{(row.slot, row.incarnation): row for row in ended.rows}}
        # A learner may know a life whose row had not reached any books when all processes were killed.
        unheard = {life for life in settled if not self._books.is_folded(life)}
        for life in sorted(rows.keys() | unheard):
            row = rows.get(life)
            if life[0] in ended.folded and life[1] in ended.folded[life[0]]:
                continue
            is_over = row is not None and row.closed and row.held == (0, 0)
            has_end = row is not None and (row.end_taken or row.accepted == (0, 0))
            path = recorder_path(self._recorders, *life)
            has_stepped = bool(settled.get(life, Settled()).seq or (row is not None and row.totals.stepped))
            is_kept = is_there(path) and not (has_stepped and is_unborn(path))
            if (is_over and has_end) or life[0] not in slots or is_kept:
                continue
            log.warning("the recorder of worker %d incarnation %d is lost: Redis knows the following", *life)
            self.send(proved_obituary(life, row, settled.get(life, Settled()), self._lost_by(life)))

    def _send_ended(self, may_have_ended: Callable[[Life], bool], own: Container[Life]) -> None:
        for life, path in recorders_in(self._recorders):
            self._recorded.add(life)
            if life in own or life in self._deaths or life in self._unreadable | self._unread:
                continue
            reading = read_recorder(path)
            if reading is not None and is_written_to(path, reading.pid):
                self._seen_living.add(life)
            elif not may_have_ended(life):
                continue
            elif reading is None and not is_unborn(path):
                self._unreadable.add(life)
                log.error("%s cannot be read, so its steps are not in the books; it is kept", path)
            else:
                self.send(write_obituary(self._recorders, *life, _reason_left_over(reading, self._lost_by(life))))

    def _lost_by(self, life: Life) -> Drop:
        """Return the reason for batches that only an earlier broker had; `SHUTDOWN` for one that stopped in order."""
        row = self._books.rows.get(life)
        return Drop.SHUTDOWN if row is not None and row.stopped else Drop.BROKER_LOST

    def delete_stored(self, rows: Mapping[Life, LedgerRow], folded: Mapping[int, FoldedLives] = NO_LIVES) -> None:
        """Delete the recorders of the dead whose final books stand in `rows` or `folded`, as read from Redis.

        Keep a recorder until a learner has taken the life's end. Forget lives that are folded: the broker's file has
        them, so no later broker needs their obituaries.
        """
        for life, death in sorted(self._deaths.items()):
            lives = folded.get(life[0])
            is_folded = lives is not None and life[1] in lives
            row = lives.row if lives is not None and is_folded else rows.get(life)
            is_over = row is not None and row.held == (0, 0) and (is_folded or row.end_taken)
            path, may_go = recorder_path(self._recorders, *life), is_over and life in self._not_stored
            if may_go and row is not None and self._delete_covered(life, path, row):
                self._not_stored.remove(life)
            if is_folded and life not in self._not_stored and death.known:
                self._deaths.pop(life).stop_sending()

    def _delete_covered(self, life: Life, path: Path, row: LedgerRow) -> bool:
        """Delete the recorder of a life if `row` covers it. Return whether it is gone; a later call tries again."""
        try:
            if not covers(row, read_recorder(path)):
                return False
            self._delete_recorder(life)
        except OSError as error:
            self._warnings.warn(b"", "deleting", f"a recorder whose books are final cannot be deleted yet: {error}")
            return False
        return True

    def knows(self, life: Life) -> bool:
        """Return whether this supervisor has an obituary of the life."""
        return life in self._deaths

    def follow(self, endpoint: str) -> None:
        """Connect to the broker at `endpoint` and resend all obituaries. Do nothing for the present address or ""."""
        if endpoint in ("", self._endpoint):
            return
        log.info("the broker has moved from %s to %s", self._endpoint, endpoint)
        self._socket.disconnect(self._endpoint)
        self._endpoint = endpoint
        self._handshakes = Handshakes(endpoint, "supervisor", self._keys)
        self._socket.connect(endpoint)
        self.resend()

    def _delete_recorder(self, life: Life) -> None:
        self._recorded.discard(life)
        recorder_path(self._recorders, *life).unlink(missing_ok=True)

    def all_final(self) -> bool:
        """Return whether the books of every death are final, as the broker says. Their recorders are deleted."""
        return not self._deaths and not self._unread

    def all_acknowledged(self) -> bool:
        """Return whether the broker that runs now knows of every death."""
        return not self._unread and all(death.known for death in self._deaths.values())

    def close(self) -> None:
        """Stop sending. Lives whose final books are not in Redis stay in their recorders for the next supervisor."""
        for death in self._deaths.values():
            death.stop_sending()
        if self._pause_timer is not None:
            self._pause_timer.cancel()
        self._loop.forget(self._socket)
        self._loop.forget(self._monitor)
        self._own.close()

    def _send_pause(self) -> None:
        with suppress(zmq.Again):
            self._socket.send_multipart(self._hello.frames(), zmq.NOBLOCK)
        self._pause_timer = self._loop.call_later(_REPEAT_PAUSE_S, self._send_pause)

    def _send(self, life: Life) -> None:
        death = self._deaths[life]
        try:
            self._socket.send_multipart(self._hello.frames(), zmq.NOBLOCK)
            self._socket.send_multipart(death.obituary.frames(), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("no broker to tell of the end of worker %d incarnation %d", *life)
        death.timer = self._loop.call_later(death.pause_s, lambda: self._send(life))
        death.pause_s = min(2 * death.pause_s, LONGEST_PAUSE_S)

    def _receive(self) -> None:
        while sockets.has_message(self._socket):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                kind, header = decode_header(frames)
                message = read(_CONTROL[kind], header) if kind in _CONTROL else None
                if isinstance(message, Ack) and message.closed:
                    self._on_ack(message)
                elif isinstance(message, Reject):
                    self._warnings.warn(b"", message.code, f"the broker refuses an obituary: {message.detail}")
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
        if ack.accepted and not death.obituary.totals.stepped and life not in self._recorded:
            self._note_unrecorded(life, has_stepped=True)  # it was removed before this supervisor had seen it
        if not self._reads_redis and ack.final:
            self._delete_recorder(life)
            del self._deaths[life]
            return
        if not self._reads_redis:
            death.timer = self._loop.call_later(LONGEST_PAUSE_S, lambda: self._send(life))
        if ack.settled.seq > death.obituary.settled.seq:  # so that the obituary gives the next broker this position too
            window = [batch for batch in death.obituary.window if batch.seq > ack.settled.seq]
            death.obituary = death.obituary.model_copy(update={"settled": ack.settled, "window": window})


def proved_obituary(life: Life, row: LedgerRow | None, by_learner: Settled, lost_by: Drop) -> Obituary:
    """Return the obituary of a life without a recorder. The learner's position may be newer than the row."""
    totals, settled = (row.totals, row.settled) if row is not None else (WorkerTotals(), Settled())
    settled = max(settled, by_learner, key=lambda told: told.seq)
    if settled.seq > totals.seq:
        totals = _as_settled(totals, settled)
    totals = totals.model_copy(update={"module_steps": {}})  # a row has module steps of accepted batches only
    reason = Discard.WORKER_KILLED if totals.open else lost_by
    return Obituary(slot=life[0], incarnation=life[1], totals=totals, settled=settled, reason=reason)


def _as_settled(totals: WorkerTotals, settled: Settled) -> WorkerTotals:
    """Return `totals` as of the last settled batch. Later batches may contain steps that were open then."""
    shipped, chunks = settled.total()
    gone = sum(totals.discarded.values()) + sum(steps for steps, _ in totals.dropped.values())
    open_steps = max(0, totals.stepped - gone - shipped)
    stepped = gone + shipped + open_steps
    is_of_one_agent = totals.env_steps == totals.stepped
    return totals.model_copy(
        update={
            "seq": settled.seq,
            "stepped": stepped,
            "open": open_steps,
            "shipped": shipped,
            "shipped_chunks": chunks,
            "env_steps": stepped if is_of_one_agent else totals.env_steps,
        }
    )


def reason_of(record: ExitRecord | None) -> str:
    """Return the obituary's reason for a worker with this exit record."""
    reasons: dict[int, str] = {ExitCode.OK: "shutdown", ExitCode.FENCED: "fenced"}
    return reasons.get(record.exit_code, "worker_killed") if record is not None else "worker_killed"


def _reason_left_over(reading: Reading | None, lost_by: Drop) -> str:
    """Return the reason for a life under an earlier supervisor.

    If a broker had accepted everything, return `lost_by`. Otherwise the worker was killed.
    """
    if reading is not None and not reading.totals.open and reading.accepted >= reading.totals.seq:
        return lost_by
    return Discard.WORKER_KILLED


def _last_words(obituary: Obituary, accepted: int) -> str:
    """Return a sentence on a dead worker's steps. The broker has accepted its first `accepted` batches."""
    who, totals = f"worker {obituary.slot} incarnation {obituary.incarnation}", obituary.totals
    if accepted >= totals.seq and not totals.open:
        return f"{who} took {totals.stepped:,} steps, and the broker has them all"
    lost = [batch for batch in obituary.window if batch.seq > accepted]
    return (
        f"{who} took {totals.stepped:,} steps; {totals.open:,} were in no batch yet, and {len(lost)} batches had not "
        "reached the broker"
    )

"""The stream of episode chunks that a learner trains on.

    with EpisodeStream(endpoint) as stream:
        for batch in stream:        # ChunkBatch; asking for the next settles this one
            train(batch)

A batch handed out and not yet committed comes again if this process dies. With `auto_commit=False` call `commit()`
yourself, after writing `position()` into your own checkpoint. A restart from that checkpoint then trains on every
settled step exactly once. The broker may learn of an automatic commit only at the next call on the stream.

Only one thread may use a stream. While it trains, ZeroMQ's own threads go on receiving.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.learner_stub import connection
from headrace.learner_stub.fleet_place import FleetPlace, await_endpoint, keys_folder
from headrace.learner_stub.lag import LagMonitor
from headrace.learner_stub.ready_batches import ReadyBatches
from headrace.learner_stub.session import LearnerSession, LearnerSessionState, StreamLimits
from headrace.learner_stub.stall_detector import StallDetector
from headrace.learner_stub.update_size import UpdateSize
from headrace.schemas.batch import ChunkBatch, read_batch_header
from headrace.schemas.batch_reader import UnreadBatch
from headrace.schemas.errors import DecodeError, UnreachableError, refusal
from headrace.schemas.keys import ClientKeys, client_keys
from headrace.schemas.learner_messages import MOST_WINDOW_STEPS
from headrace.schemas.messages import (
    Fenced,
    LearnerWelcome,
    Message,
    Reject,
    SourceEnd,
    SourceGap,
    SourcePosition,
    SourceStart,
    Status,
    Version,
    read,
)
from headrace.schemas.spaces import Spaces
from headrace.schemas.wire import MessageKind, decode_header

log = logging.getLogger("headrace.learner")

_CONTROL: dict[MessageKind, type[Message]] = {
    m.KIND: m for m in (LearnerWelcome, Status, SourceStart, SourceGap, SourceEnd, Fenced, Reject)
}
_MAX_PUMPED = 256


class EpisodeStream:
    """Batches of chunks from the broker at `endpoint`, each handed out once and in order per episode.

    - position: the result of `position()` in an earlier process.
    - window_batches, window_bytes: how much the broker may send ahead of what was handed out.
    - steps_per_update: steps that one update of this learner takes. Workers then keep about as many in hand, in
      addition to those under training, so that data stays fresh with any number of workers. None: measured from one
      published version to the next, or from one commit to the next where none is published.
    - synchronous: workers ship `steps_per_update` steps with each version of the weights, all together, and wait for
      the next one: sample, train, sample. No step is older than the weights (lag 0), and with a fixed number of
      workers and a seed the batches are the same each time, to the bit and in order. Without `steps_per_update` each
      worker ships one cut. False: as `sampling.synchronous` says in the config of the fleet.
    - warn_lag: mean lag of a batch, in versions, above which it is late. The first late one is logged. None: no batch
      is late.
    - batch_timeout_s: how long a loop over the stream waits for a batch before it ends. None: for ever.
    - silence_timeout_s: how long the broker may be silent before the fleet counts as ended. One that was stopped, as
      its run directory says, counts as ended after 10 s.
    - run_dir: the fleet's run directory, where the stream finds the broker after a restart of `headrace up`; see `of`.
    - keys: a folder with learner.secret and broker.public. None: the folder in the environment's HEADRACE_KEYS__DIR, or
      no keys. "" is no keys.

    Once open it has further attributes:

    - pending: batches received and not handed out.
    - delivered: batches handed out.
    - redelivered: repeats ignored.
    - lag: by how many versions the newest steps were behind the newest weights when they were handed out, in the mean.
    - late_batches: batches whose own mean was above `warn_lag`.
    - dropped: steps by reason that never reached this learner, of the sources it has seen.

    Raises:
        FencedError: a newer learner has taken over; later calls raise it too.
        UnreachableError: no broker answers within `connect_timeout_s`.
        WrongFleetError: `fleet_id`, or the fleet of `position`, is not the broker's.
        KeysError: the keys cannot be used.
        KeysRefusedError: the broker does not let them in.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        position: Sequence[dict[str, Any]] | None = None,
        window_batches: int = 64,
        window_bytes: int = 256 << 20,
        auto_commit: bool = True,
        steps_per_update: int | None = None,
        synchronous: bool = False,
        warn_lag: float | None = 10.0,
        fleet_id: str = "",
        connect_timeout_s: float = 60.0,
        batch_timeout_s: float | None = None,
        silence_timeout_s: float = 60.0,
        keys: str | Path | ClientKeys | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        if steps_per_update is not None and not 0 < steps_per_update <= MOST_WINDOW_STEPS // 2:
            raise ValueError(f"steps_per_update = {steps_per_update} is no number of steps; give one above 0, or None")
        self._keys = client_keys(keys, "learner")
        self._place = FleetPlace(endpoint, Path(run_dir) if run_dir is not None else None, silence_timeout_s)
        self._batch_timeout_s = batch_timeout_s
        self.auto_commit = auto_commit
        self.delivered = 0
        limits = StreamLimits(
            window_batches=window_batches,
            window_bytes=window_bytes,
            synchronous=synchronous,
            steps_per_update=steps_per_update or 0,
        )
        places = [read(SourcePosition, place) for place in position or []]
        fleet_id = fleet_id or next((str(place.get("fleet_id", "")) for place in position or []), "")
        self.token = connection.stream_token(endpoint)
        self._session = LearnerSession(self.token, limits, fleet_id=fleet_id, position=places)
        self._ready = ReadyBatches(self._session)
        self._updates = UpdateSize(steps_per_update, auto_commit=auto_commit)
        self._published: Version = (0, 0)
        """The newest version that this process published, as of the last look."""
        self._lag = LagMonitor(warn_lag)
        self._session.want_window(self._updates.window_steps())
        self._stall = StallDetector(self._session)
        self._socket = connection.LearnerSocket(endpoint, self._keys)
        connection.enroll(self)
        self._join(connect_timeout_s)

    @classmethod
    def of(cls, run_dir: str | Path, *, connect_timeout_s: float = 60.0, **options: Any) -> Self:
        """Return a stream of the fleet in `run_dir`, which `headrace up` may start later, and start again.

        Waits up to `connect_timeout_s` for its broker, and follows it to other ports. Keys are those in the config of
        the fleet, unless `options` or the environment name others. `options` are those of the constructor, whose errors
        it raises.
        """
        options = {"keys": keys_folder(run_dir), **options}
        endpoint = await_endpoint(run_dir, connect_timeout_s)
        return cls(endpoint, run_dir=run_dir, connect_timeout_s=connect_timeout_s, **options)

    # -- what a learner calls -----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ChunkBatch]:
        """Yield batches until the fleet has ended, or none came for `batch_timeout_s`. The log says why."""
        wait_s = self._batch_timeout_s if self._batch_timeout_s is not None else math.inf
        asked = connection.now()
        while not self.ended:
            batch = self.next(timeout_s=min(1.0, wait_s))
            if batch is not None:
                yield batch
                asked = connection.now()
            elif connection.now() - asked >= wait_s:
                log.warning("the stream ends: no batch for batch_timeout_s = %g s", wait_s)
                return

    def next(self, timeout_s: float) -> ChunkBatch | None:
        """Return the next batch, or None after `timeout_s` seconds without one."""
        if self.auto_commit:
            self._commit(at_once=False)
        deadline = connection.now() + timeout_s
        while True:
            if self._ready:
                return self._hand_out()
            arrival = self._session.take()
            if arrival is not None:
                self._stall.reset()
                self._ready.open(arrival, max(self._session.published, connection.newest_published(self.token)))
                continue
            left = deadline - connection.now()
            if left <= 0:
                self._stall.add_wait(timeout_s)
                if self._stall.take_hint():
                    self._updates.widen()
                    self._session.want_window(self._updates.window_steps())
                return None
            self.pump(min(left, 0.1))

    def _hand_out(self) -> ChunkBatch:
        self._note_published()
        batch = self._ready.hand_out()
        self.delivered += 1
        self._updates.take(batch.steps)
        self._lag.observe(batch, self._updates.steps)
        self._session.want_window(self._updates.window_steps())
        return batch

    def commit(self) -> None:
        """Settle every batch handed out so far: workers and broker may then forget it."""
        self._note_published()
        if connection.newest_published(self.token) == (0, 0) and not self.auto_commit:
            self._end_update()
        self._commit(at_once=True)

    def position(self) -> list[dict[str, Any]]:
        """Return how far this learner is, counting all it was handed as trained on.

        The result is plain values for the learner's own checkpoint.
        """
        fleet = {"fleet_id": self._session.fleet_id}
        return [fleet | place.model_dump(mode="json") for place in self._session.position()]

    def spaces(self, module_id: str | None = None, *, timeout_s: float = 300.0) -> Spaces:
        """Return the observation and action space of a module, or of the only one there is.

        Waits as `module_spaces` does. Raises its errors, and `WhichModuleError`, naming the modules.
        """
        self.module_spaces(timeout_s=timeout_s)
        return self._ready.modules.spaces_of(module_id)

    def module_spaces(self, *, timeout_s: float = 300.0) -> dict[str, Spaces]:
        """Return module id -> the spaces of its chunks. Waits for the first worker to tell them.

        Raises `UnreachableError` when none does in time.
        """
        deadline = connection.now() + timeout_s
        while not self._session.spaces:
            if connection.now() > deadline:
                raise UnreachableError("worker", self.endpoint, timeout_s)
            self.pump(0.1)
        self._ready.modules.learn(self._session.spaces)
        return dict(self._ready.modules.spaces)

    @property
    def endpoint(self) -> str:
        """Return the broker's address."""
        return self._place.endpoint

    @property
    def ended(self) -> str:
        """Return why the fleet counts as ended: it was stopped, or its broker is silent; "" while it does not.

        A loop over the stream ends then. A fleet that is back is not ended any more.
        """
        return self._place.ended

    @property
    def starved(self) -> bool:
        """Return whether no batch can come before a commit.

        True once every worker waits for a commit, and `next` has waited 3 s without a batch. Train on what was handed
        out, and commit. A learner that waits on gets a `WindowStalledError` from `next` after 30 s.
        """
        return self._stall.starved

    @property
    def lag(self) -> float:
        """Return the mean lag of the newest steps handed out, in versions of the weights."""
        return self._lag.mean

    @property
    def late_batches(self) -> int:
        """Return the number of batches whose mean lag was above `warn_lag`."""
        return self._lag.late_batches

    @property
    def epoch(self) -> int:
        """Return the learner epoch of this process's lease."""
        return self._session.epoch

    @property
    def pending(self) -> int:
        """Return the number of batches received and not handed out."""
        return len(self._session.arrivals) + len(self._ready)

    @property
    def dropped(self) -> Counter[str]:
        """Return the steps by reason that never reached this learner, of the sources it has seen."""
        return self._ready.dropped

    @property
    def redelivered(self) -> int:
        """Return the number of repeated batches that were ignored."""
        return self._session.redelivered

    def close(self) -> None:
        """Close the connection. Batches handed out and not committed go to the next learner again."""
        connection.leave(self)
        connection.forget_token(self.endpoint, self.token)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.auto_commit:
            self.commit()
        self.close()

    # -- the wire -----------------------------------------------------------------------------------------------------

    def pump(self, wait_s: float = 0.0) -> None:
        """Take what has arrived and send what is due, waiting up to `wait_s` for something to arrive."""
        self._note_published()
        # First take what came while the user trained: the session then judges how long the broker has been silent.
        self._take_all(0.0)
        self._session.tick(connection.now(), waiting=wait_s > 0)
        self._flush()
        if wait_s > 0:
            self._take_all(min(wait_s, self._session.idle_s(connection.now())))
            self._session.tick(connection.now())
            self._flush()
        if self._session.refusal is not None:
            raise refusal(*self._session.refusal)
        self._follow_broker()
        connection.pump_together(self)

    def _follow_broker(self) -> None:
        """Connect to the broker's new address if it has one."""
        before = self.endpoint
        moved = self._place.observe(self._session.state is LearnerSessionState.ACTIVE, connection.now())
        if moved is not None:
            connection.move_token(self.token, before, moved)
            self._socket.close(0.0)
            self._socket = connection.LearnerSocket(moved, self._keys)
            self._session.not_sent()

    def _note_published(self) -> None:
        """End the update if this process has published a version since the last look."""
        newest = connection.newest_published(self.token)
        if newest > self._published:
            self._published = newest
            self._end_update()

    def _end_update(self) -> None:
        self._updates.end()
        self._session.want_window(self._updates.window_steps())

    def _take_all(self, wait_s: float) -> None:
        for _ in range(_MAX_PUMPED):
            frames = self._socket.receive(wait_s)
            if frames is None:
                break
            wait_s = 0.0
            self._receive(frames)

    def _join(self, timeout_s: float) -> None:
        deadline = connection.now() + timeout_s
        try:
            while self._session.state is LearnerSessionState.JOINING:
                if connection.now() > deadline:
                    raise self._socket.why_silent(timeout_s)
                self.pump(0.05)
        except BaseException:
            self.close()
            raise

    def _commit(self, *, at_once: bool) -> None:
        if self._session.uncommitted():
            self._session.commit(connection.now(), at_once=at_once)
            self._flush()

    def _flush(self) -> None:
        for message in self._session.take_outbox():
            if not self._socket.send(message.frames()):
                self._session.not_sent()

    def _receive(self, frames: list[memoryview]) -> None:
        try:
            kind, header = decode_header(frames)
            if kind is MessageKind.BATCH:
                unread = UnreadBatch(read_batch_header(header), header, frames)
                self._session.receive_batch(unread.header, unread, connection.now())
            elif kind in _CONTROL:
                self._session.receive(read(_CONTROL[kind], header), connection.now())
        except DecodeError as error:
            if error.reason == "version_mismatch":
                raise refusal(error.reason, f"broker at {self.endpoint}: {error.detail}") from error

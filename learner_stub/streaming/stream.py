"""The stream of episode chunks that a learner trains on.

    with EpisodeStream(endpoint) as stream:
        for batch in stream:        # ChunkBatch; asking for the next settles this one
            train(batch)

A batch handed out and not yet committed comes again if this process dies. With `auto_commit=False` call `commit()`
yourself, after writing `position()` into your own checkpoint. A restart from that checkpoint then trains on every
settled step exactly once. The broker may learn of an automatic commit only at the next call on the stream.

Threads may share a stream and its publisher: one reads, and another one trains, commits and publishes. A commit counts
all that any of them was handed. Meanwhile ZeroMQ's own threads go on receiving. After Ctrl-C in a call, as in a
notebook, the stream goes on with the batch after the last one that it returned. A copy by `fork` cannot be used.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType
from typing import Any, Literal, Self, cast

from headrace.learner_stub.link import connection
from headrace.learner_stub.link.broker_link import BrokerLink, Watched, await_message
from headrace.learner_stub.link.fleet_place import Where, address_sources, as_list, find_fleet, recorded_kind
from headrace.learner_stub.link.ranks import RankPort, RankZero, chosen_rank
from headrace.learner_stub.link.time_spent import TimeSpent
from headrace.learner_stub.streaming.broker_stream import BrokerStream
from headrace.learner_stub.streaming.lag import mean_lag
from headrace.learner_stub.streaming.rank_rounds import RankRounds
from headrace.learner_stub.streaming.rank_sessions import ENDED, MOST_AHEAD
from headrace.learner_stub.streaming.ready_batches import Turns
from headrace.learner_stub.streaming.session import SILENCE_S, LearnerSessionState, StreamLimits
from headrace.learner_stub.streaming.source_progress import by_broker
from headrace.learner_stub.streaming.stall_detector import StallDetector
from headrace.learner_stub.streaming.update_size import UpdateSize
from headrace.schemas.basics.bounds import TRAIN, Version
from headrace.schemas.basics.printable import brief, one_line
from headrace.schemas.basics.stop_event import check_stop, interrupt_held
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.credentials.key_files import group_rule, is_group
from headrace.schemas.credentials.keys import ClientKeys, client_keys
from headrace.schemas.errors import ConfigError, UnreachableError, refusal
from headrace.schemas.messages.learner_messages import MOST_WINDOW_STEPS, Ranks
from headrace.schemas.peers.fleet_address import SAY_WAITING_S, AddressSource
from headrace.schemas.peers.fleet_place import FleetPlace

log = logging.getLogger("headrace.learner")

STOPPED_WAIT_S = 10.0
"""Seconds that a stopped fleet may take to start again before a stream ends."""

_OTHER_BROKERS_S = 5.0
"""Seconds that a stream waits, once one of several brokers has answered, for the others to answer too."""

_NOTE_WAIT_S = 1.0
"""Seconds of a wait after which a stream looks for what could end it."""

_LAST_COMMITS_S = 5.0
"""Seconds that rank 0 waits, before it closes, for the other ranks to commit what they got last."""


class EpisodeStream:
    """Batches of chunks from the broker at `endpoint`, each handed out once and in order per episode.

    A fleet of several brokers has a list of endpoints, in the order of `broker.index`. Their batches come in turn as
    one stream with one position. A broker that is gone costs its workers' share until it is back.

    - position: the result of `position()` in an earlier process.
    - window_batches, window_bytes: how much the broker may send ahead of what was handed out.
    - steps_per_update: steps that one update of this learner takes. Workers then keep about as many in hand, in
      addition to those under training, so that data stays fresh with any number of workers. None: measured from one
      published version to the next, or from one commit to the next where none is published.
    - synchronous: workers ship `steps_per_update` steps with each version of the weights, all together, and wait for
      the next one: sample, train, sample. No step is older than the weights (lag 0), and with a fixed number of
      workers and a seed the batches are the same each time, to the bit and in order. Without `steps_per_update` each
      worker ships one cut. False: as `sampling.synchronous` says in the config of the fleet.
    - warn_lag: mean lag of a batch, in versions, above which it is late. The first late one is logged. None, and in
      another group than "train": no batch is late.
    - batch_timeout_s: how long a loop over the stream waits for a batch before it ends. None: for ever.
    - silence_timeout_s: how long all brokers may be silent before the fleet counts as ended. One that was stopped, as
      its run directory says, counts as ended after 10 s, and at once where it has reached its goal.
    - run_dir: the fleet's run directory, where the stream finds the broker after a restart of `headrace up`; see `of`.
    - rendezvous: the file or URL where the fleet's broker publishes its addresses, in place of `run_dir`. With several
      brokers: a list. An endpoint that is not known yet is "".
    - group: the consumer group that this stream reads for. Each group gets every batch; "train" is the learner's, the
      only one that publishes weights and says how much is under way. A group that the fleet's config does not name in
      `broker.consumer_groups` begins with its first stream, and loses its oldest batches when it is slow.
    - rank, world_size: this stream is one of `world_size` ranks, 0 and up, which share the batches of its group. Each
      has a process; "env" takes both from RANK and WORLD_SIZE, as `torchrun` sets them. Rank 0 alone has a position,
      and hands the batches to the others; see `round_of`. Its stream opens once all others are there.
    - ranks: "shared": batches that a lost rank had not committed go to the others. "fixed": they wait for the next
      process of that rank. A rank is lost after 5 s without a connection to rank 0.
    - commit_lag: with `auto_commit`, asking for a batch settles the one that was asked for as many calls earlier: for
      users that keep some batches waiting, as a `DataLoader` does.
    - keys: a folder with learner.secret and broker.public. None: the folder in the environment's HEADRACE_KEYS__DIR, or
      no keys. "" is no keys. A fleet at a Unix socket needs none.

    Once open it has further attributes:

    - pending: batches received and not handed out.
    - delivered: batches handed out.
    - redelivered: repeats ignored.
    - lag: by how many versions the newest steps were behind the newest weights when they were handed out, in the mean.
    - late_batches: batches whose own mean was above `warn_lag`.
    - dropped: steps by reason that never reached this learner, of the sources it has seen.

    Raises:
        FencedError: a newer learner, or reader of the same group, has taken over; later calls raise it too.
        UnreachableError: no broker answers within `connect_timeout_s`, or a rank is missing then.
        RefusedError: `fleet_id`, or the fleet of `position`, is not the broker's.
        ConfigError: `position` is of another number of brokers than there are endpoints, or of another group.
        ConfigError: there is no such rank, or ranks are to sample synchronously.
        RefusedError: rank 0 has another `world_size`.
        ConfigError: `group` is no name, or goes with `steps_per_update` or `synchronous`, which are the learner's.
        RefusedError: the workers of two brokers have different envs.
        KeysError: the keys cannot be used.
        KeysRefusedError: the broker does not let them in.
        RunDirError: `endpoint` is a Unix socket in a folder that is not this user's alone.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
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
        rendezvous: Where | AddressSource | Sequence[AddressSource] = None,
        group: str = TRAIN,
        rank: int | Literal["env"] = 0,
        world_size: int = 1,
        ranks: Literal["shared", "fixed"] = "shared",
        commit_lag: int = 0,
    ) -> None:
        endpoints = as_list(endpoint)
        self.rank, self.world_size = chosen_rank(rank, world_size)
        _check_options(group, steps_per_update, synchronous, len(endpoints), self.world_size)
        _check_ranks(ranks, commit_lag)
        peer_keys = client_keys(keys, "learner")
        sources = address_sources(run_dir, rendezvous, len(endpoints))
        self._turns = Turns(commit_lag) if auto_commit and (commit_lag or self.world_size > 1) else None
        self._rounds: RankRounds | None = None
        self._rank_zero: RankZero | None = None
        if self.rank:  # rank 0 answers in the place of the brokers
            own = Ranks(rank=self.rank, world_size=self.world_size)
            self._rank_zero = RankZero(own, endpoints[0], sources[0], peer_keys, group)
            endpoints, sources, position, peer_keys = [""], [self._rank_zero], None, self._rank_zero.keys
        self._batch_timeout_s = batch_timeout_s
        self.auto_commit = auto_commit
        self.delivered = 0
        limits = StreamLimits(
            window_batches=-(-window_batches // len(endpoints)),
            window_bytes=-(-window_bytes // len(endpoints)),
            synchronous=synchronous,
            steps_per_update=steps_per_update or 0,
            silence_s=math.inf if self.rank else SILENCE_S,  # rank 0 says nothing while it trains
        )
        places = by_broker(position or [], fleet_id, len(endpoints), group)
        if self.world_size > 1 and not self.rank:
            port = RankPort(self.world_size, endpoints, peer_keys)
            self._rounds = RankRounds(port, self._turns, is_fixed=ranks == "fixed")
        self.group = group
        self.token = connection.stream_token(endpoints, group)
        self._lock = connection.shared(self.token).lock
        self._forget_token = weakref.finalize(self, connection.forget_token, self.token)
        self._brokers: list[BrokerStream] = []
        self._agreeing = 0
        """Number of brokers whose spaces were compared and are equal."""
        self._turn = 0
        """The broker whose batch is handed out next, if it has one."""
        for number, (address, source) in enumerate(zip(endpoints, sources, strict=True)):
            place = self._place(address, source, silence_timeout_s)
            link = BrokerLink(place, peer_keys, self.token, number, keeps_unread=self.rank > 0)
            self._brokers.append(BrokerStream(link, limits, *places[number], warn_lag, group, turns=self._turns))
        if (own_place := self._rank_zero or self._rounds) is not None:
            self._brokers[0].session.ranks = own_place.told
        self._time = connection.shared(self.token).time_spent = TimeSpent()
        self._time.start()
        in_hand = 1 + commit_lag + (MOST_AHEAD if self._rounds is not None else 0)
        self._updates = UpdateSize(steps_per_update, auto_commit=auto_commit, rounds_in_hand=in_hand)
        self._published = self._newest_published()
        """The newest version that this process published to each broker, as of the last look."""
        self._stall = StallDetector([broker.session for broker in self._brokers], self._turns, self.rank)
        self._counted_to = 0.0
        """The time up to which waits for a batch were counted."""
        self._want_window()
        connection.enroll(self)
        self._join(connect_timeout_s)
        if self._rank_zero is not None:
            self._rank_zero.has_joined = True
        connection.replace_older(self.token)

    def _place(self, address: str, source: AddressSource | None, patience_s: float) -> FleetPlace:
        return FleetPlace(
            address,
            "learner",
            source,
            patience_s=patience_s,
            server="stream of rank 0" if self.rank else "broker",
            stopped_patience_s=min(STOPPED_WAIT_S, patience_s),
        )

    @classmethod
    def of(cls, where: Where | Sequence[Where] = None, *, connect_timeout_s: float = 60.0, **options: Any) -> Self:
        """Return a stream of the fleet whose run directory or rendezvous is `where`.

        `headrace up` may start it later, and start it again. A rendezvous is a file NAME.json or http(s)://...; None is
        the one in the environment's HEADRACE_FLEET__RENDEZVOUS. A fleet of several brokers has a list, in the order of
        `broker.index`. Waits up to `connect_timeout_s` for its broker, or one of them, and follows it to other
        addresses. Keys are those in the config of the run, unless `options` or the environment name others. `options`
        are those of the constructor, whose errors it raises. The folder of a recording gives a `RecordedStream`.
        """
        if (kind := recorded_kind(where)) is not None:
            return cast("Self", resolve_name(kind)(where, **options))
        endpoint, found = find_fleet(where, connect_timeout_s, options)
        return cls(endpoint, **found)

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

    def __next__(self) -> ChunkBatch:
        return next(iter(self))

    def __repr__(self) -> str:
        steps = sum(sum(broker.lag.counts) for broker in self._brokers)
        state = f"{self.workers} workers" if not (ended := self.ended) else f"ended: {ended}"
        read = f"{steps:,} steps in {self.delivered:,} batches, lag {self.lag:.1f}"
        return one_line(f"<EpisodeStream from {self.endpoint}: {read}, {state}>")

    def next(self, timeout_s: float) -> ChunkBatch | None:
        """Return the next batch, or None after `timeout_s` seconds without one."""
        batches = self._ask(1, timeout_s)
        return batches[0] if batches else None

    def round_of(self, count: int, timeout_s: float | None = None) -> list[ChunkBatch]:
        """Return the next `count` batches together, or none after `timeout_s` seconds without as many.

        None: wait until the fleet has ended. All ranks ask for the same `count`, and each gets as many, so that no rank
        waits in a collective operation for one without data. A round begins when rank 0 asks for it, and is balanced by
        steps. Rank 0 waits for a rank that is two rounds behind, in addition to `commit_lag`.
        """
        if count < 1:
            raise ValueError(f"count = {brief(count)}: a round has 1 batch or more")
        if timeout_s is not None:
            return self._ask(count, timeout_s)
        while not self.ended:
            if batches := self._ask(count, 1.0):
                return batches
        return []

    def _ask(self, count: int, timeout_s: float) -> list[ChunkBatch]:
        """Settle earlier batches if that is automatic, and wait for the next round of `count`."""
        self._check_usable()
        connection.check_newest(self.token, self.group)
        self._time.follow()
        with self._time.part("decode"), interrupt_held():
            noted = connection.now()
            deadline = noted + timeout_s
            with self._lock:
                if self.auto_commit or self.rank:  # rank 0 must know who is behind
                    self._commit(at_once=self.rank > 0, lag=self._turns.lag if self._turns is not None else 0)
                batches = self._take(count)
            while not batches:
                now = connection.now()
                is_last = now >= deadline or self._is_over
                if is_last or now >= noted + _NOTE_WAIT_S:
                    with self._lock:
                        self._note_wait(noted, now, count)
                    noted = now
                if is_last:
                    break
                self.pump(min(deadline - now, 0.1))
                with self._lock:
                    batches = self._take(count)
        return batches

    def _check_usable(self) -> None:
        """Raise `HeadraceError` if this stream is closed, or a copy by `fork`, whose batches the other process has."""
        for broker in self._brokers:
            broker.link.check()

    def _note_wait(self, since: float, now: float, count: int) -> None:
        """Note that no round came from `since` to `now`: because of other ranks, or else of the workers.

        What another thread waited at the same time was counted already.
        """
        counted_to = max(since, self._counted_to)
        waited_s, self._counted_to = max(0.0, now - counted_to), max(now, counted_to)
        if self._rounds is not None:
            if self._rounds.waits_for():
                return
            count = self._rounds.sessions.new_batches(count)
        here = [steps for broker in self._brokers for steps in broker.pending_steps()] if count > 1 else []
        others_commit = self._rounds is not None and bool(self._turns and self._turns.open)
        self._stall.add_wait(waited_s, of_others=others_commit, here=len(here))
        if self._stall.take_hint():
            self._updates.widen(sum(here) * count // len(here) if here else 0)
            self._want_window()

    def _take(self, count: int) -> list[ChunkBatch]:
        """Hand out a round of `count` batches for each rank if there is one."""
        if self._rounds is None:
            batches = self._hand_out(count)
        elif self._rounds.waits_for():
            return []
        else:
            new = self._rounds.sessions.new_batches(count)
            batches = self._hand_out(new)
            if len(batches) == new:
                batches = self._rounds.share(batches, count)
        if batches and self._turns is not None:
            self._turns.begin()
        self.delivered += len(batches)
        return batches

    def _next_broker(self) -> BrokerStream | None:
        """Return the next broker, in turn, with a batch that is ready; None if there is none."""
        for broker in (*self._brokers[self._turn :], *self._brokers[: self._turn]):
            if broker.open_next():
                self._turn = (self._brokers.index(broker) + 1) % len(self._brokers)
                return broker
        return None

    def _hand_out(self, count: int) -> list[ChunkBatch]:
        """Return the next `count` batches, or none if there are fewer."""
        if count > 1 and not self._open(count):
            return []
        batches: list[ChunkBatch] = []
        while len(batches) < count and (broker := self._next_broker()) is not None:
            if not batches:
                self._stall.reset()
                self._note_published()
            batch = broker.hand_out()
            broker.lag.observe(batch, self._updates.steps)
            batches.append(batch)
        if batches:
            self._updates.take(sum([batch.steps for batch in batches]))
            self._want_window()
        return batches

    def _open(self, count: int) -> bool:
        """Read what has arrived, if it may be enough for `count` batches. Return whether as many are ready."""
        while sum(broker.coming for broker in self._brokers) < count:
            if not sum([broker.take_one() for broker in self._brokers]):
                return False
        while sum(len(broker.ready) for broker in self._brokers) < count:
            if not sum([broker.open_one() for broker in self._brokers]):
                return False
        return True

    def commit(self) -> None:
        """Settle every batch handed out so far: workers and broker may then forget it.

        Rank 0 settles for all ranks, so call it once all have trained on what they got. A commit of another rank then
        settles nothing. With `auto_commit` a round is settled once each rank has committed its part.
        """
        self._check_usable()
        with interrupt_held(), self._lock:
            self._note_published()
            if not any(seq for _, seq in self._published) and not self.auto_commit:
                self._end_update()
            self._updates.commit()
            self._commit(at_once=True)

    def position(self) -> list[dict[str, Any]]:
        """Return how far this learner is, counting all it was handed as trained on, and which episodes are open.

        The result is plain values for the learner's own checkpoint. It takes about 0.1 ms for each worker. Rank 0 has
        it for all ranks; take it where all have trained on what they got. With `commit_lag`, and with automatic commits
        of ranks, it counts what is settled. With several brokers, or after a damaged batch, its open episodes may be of
        a batch that was read for the next round of several batches.

        Raises:
            ConfigError: this is another rank than 0.
            RefusedError: a rank was lost, and its batches were not handed out again yet.
        """
        if self.rank:
            raise ConfigError(f"rank 0 has the position of all ranks; this is rank {self.rank}", key="rank")
        with self._lock:
            if self._rounds is not None:
                self._rounds.check_position()
            return [place for broker in self._brokers for place in broker.position()]

    def spaces(self, module_id: str | None = None, *, timeout_s: float = 300.0) -> Spaces:
        """Return the observation and action space of a module, or of the only one there is.

        Waits as `module_spaces` does. Raises its errors, and `ModuleError`, naming the modules.
        """
        self.module_spaces(timeout_s=timeout_s)
        return self._telling[0].ready.modules.spaces_of(module_id)

    def module_spaces(self, *, timeout_s: float = 300.0) -> dict[str, Spaces]:
        """Return module id -> the spaces of its chunks. Waits for the first worker to tell them.

        Raises `UnreachableError` when none does in time, or the fleet has ended.
        """
        began = connection.now()
        say_at = SAY_WAITING_S
        while not self._telling:
            waited_s = connection.now() - began
            if waited_s >= say_at:
                say_at += SAY_WAITING_S
                text = "no worker has told the spaces of its envs: %s (%.0f s, waits for at most %.0f s)"
                log.warning(text, self._stall.whom(), waited_s, timeout_s)
            if waited_s > timeout_s:
                raise UnreachableError("worker", self.endpoint, timeout_s)
            self.pump(0.1)  # a fleet that is back is not ended any more
            if self.ended and not self._telling:
                raise UnreachableError("worker", self.endpoint, round(waited_s), self.ended)
        if self._rounds is not None:
            self._rounds.tell_status()
        modules = self._telling[0].ready.modules
        modules.learn(self._telling[0].session.spaces)
        return dict(modules.spaces)

    @property
    def _telling(self) -> list[BrokerStream]:
        """Return the brokers that have told the spaces of the modules."""
        return [broker for broker in self._brokers if broker.session.spaces]

    @property
    def endpoint(self) -> str:
        """Return the broker's address; those of several brokers with commas between them."""
        return ", ".join(broker.link.name for broker in self._brokers)

    @property
    def ended(self) -> str:
        """Return why the fleet counts as ended: it was stopped, or all its brokers are silent; "" while it does not.

        A loop over the stream ends then. A fleet that is back is not ended any more.
        """
        if self._is_over:
            return "" if self.pending else (self._brokers[0].session.refusal or ("", ""))[1]
        reasons = [str(broker.link.place.ended or "") for broker in self._brokers if broker.session.epoch]
        return "; ".join(reasons) if all(reasons) else ""

    @property
    def starved(self) -> bool:
        """Return whether no batch can come before a commit.

        True once every worker waits for a commit, and `next` has waited 3 s without a batch. Train on what was handed
        out, and commit. A learner that waits on gets a `WindowStalledError` from `next` after 30 s.
        """
        return self._stall.starved

    @property
    def workers(self) -> int:
        """Return the number of workers that the brokers last reported."""
        return sum(broker.session.status.workers for broker in self._brokers if broker.session.status is not None)

    @property
    def exhausted(self) -> bool:
        """Return whether every broker last reported no worker and no batch: no batch comes soon."""
        return all(broker.session.exhausted for broker in self._brokers)

    @property
    def lag(self) -> float:
        """Return the mean lag of the newest steps handed out, in versions of the weights."""
        return mean_lag(broker.lag for broker in self._brokers)

    @property
    def late_batches(self) -> int:
        """Return the number of batches whose mean lag was above `warn_lag`."""
        return sum(broker.lag.late_batches for broker in self._brokers)

    @property
    def epoch(self) -> int:
        """Return the learner epoch of this process's lease, the largest of several brokers."""
        return max(broker.session.epoch for broker in self._brokers)

    @property
    def pending(self) -> int:
        """Return the number of batches received and not handed out."""
        return sum(broker.pending for broker in self._brokers)

    @property
    def dropped(self) -> Counter[str]:
        """Return the steps by reason that never reached this learner, of the sources it has seen."""
        with self._lock:
            return sum((broker.ready.dropped for broker in self._brokers), Counter())

    @property
    def redelivered(self) -> int:
        """Return the number of repeated batches that were ignored."""
        return sum(broker.session.redelivered for broker in self._brokers)

    @property
    def _is_over(self) -> bool:
        """Return whether rank 0 has told this rank that it closes its stream."""
        return self.rank > 0 and (self._brokers[0].session.refusal or ("",))[0] == ENDED

    def close(self) -> None:
        """Close the connection. Batches handed out and not committed go to the next learner again.

        A stream that is dropped without `close` does the same. The loops of the other ranks end with that of rank 0. At
        the end of its `with` block it waits 5 s for their automatic commits: what a slower rank has then comes again.
        """
        connection.leave(self)
        self._forget_token()
        if not all(broker.link.usable for broker in self._brokers):
            return
        with self._lock:
            if self._rounds is not None:
                self._rounds.close(self.ended)
            if self._rank_zero is not None:
                self._rank_zero.close()
            for broker in self._brokers:
                broker.close()

    __reduce__ = connection.refuse_copy

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.auto_commit and all(broker.link.usable for broker in self._brokers):
            self.commit()
            self._await_ranks()
        self.close()

    def _await_ranks(self) -> None:
        """Wait a moment until the other ranks have committed their parts of the last round."""
        deadline = connection.now() + _LAST_COMMITS_S
        while self._rounds is not None and self._turns is not None and self._turns.open and connection.now() < deadline:
            self.pump(0.05)
            self._commit(at_once=True)

    # -- the wire -----------------------------------------------------------------------------------------------------

    def pump(self, wait_s: float = 0.0) -> None:
        """Take what has arrived and send what is due, waiting up to `wait_s` for something to arrive."""
        with interrupt_held():
            self._pump(wait_s)

    def _pump(self, wait_s: float) -> None:
        self._check_usable()
        connection.check_newest(self.token, self.group)
        with self._lock:
            self._note_published()
            # First take what came while the user trained: the session then judges how long the broker has been silent.
            pending = self.pending
            for broker in self._brokers:
                broker.pump(waiting=wait_s > 0)
            has_more = self.pending > pending
        if wait_s > 0:
            # A batch that came must not wait for another one, only for the commits that are gathered to be sent.
            self._await(min(wait_s, self._brokers[0].session.limits.gather_s) if has_more else wait_s)
        with self._lock:
            if wait_s > 0:
                for broker in self._brokers:
                    broker.pump(waiting=True)  # the heartbeat is due as the wait ends
            self._follow_up()

    def _follow_up(self) -> None:
        """Do what follows from what has arrived."""
        for broker in self._brokers:
            if broker.session.refusal is not None and not self._is_over:
                raise refusal(*broker.session.refusal)
        if self._rounds is not None:
            self._rounds.pump(self._brokers)
        self._check_spaces()
        self._follow_brokers()
        connection.pump_together(self)

    def _check_spaces(self) -> None:
        """Raise `RefusedError` where the workers of two brokers have different envs."""
        told = self._telling
        if len(told) == self._agreeing:
            return
        for broker in told[1:]:
            if broker.session.spaces != told[0].session.spaces:
                at = f"the workers of the brokers at {told[0].link.name} and {broker.link.name}"
                raise refusal("spaces_differ", f"{at} have different spaces; give all the same env and env_config")
        self._agreeing = len(told)

    def _await(self, wait_s: float) -> None:
        """Wait until something arrives from a broker, or is due for one."""
        now = connection.now()
        idle_s = min(wait_s, *(broker.session.idle_s(now) for broker in self._brokers))
        if idle_s > 0:
            with self._time.part("wait"):
                links: list[Watched] = [broker.link for broker in self._brokers]
                await_message(links if self._rounds is None else [*links, self._rounds], idle_s, self._lock)

    def _follow_brokers(self) -> None:
        """Connect to the new addresses of brokers that have moved."""
        had_ended = self.ended
        for broker in self._brokers:
            broker.follow()
        if self.ended and not had_ended:
            log.warning("the stream ends: %s", self.ended)

    def _note_published(self) -> None:
        """End the update if this process has published a version since the last look."""
        newest = self._newest_published()
        if newest != self._published:
            self._published = newest
            self._end_update()

    def _newest_published(self) -> list[Version]:
        return [broker.published for broker in self._brokers]

    def _end_update(self) -> None:
        self._updates.end()
        self._want_window()

    def _want_window(self) -> None:
        """Tell the brokers that answer how many steps to have under way, to each its share. Only the learner does."""
        if self.group != TRAIN or self.rank:
            return
        steps = self._updates.window_steps()
        share = steps and -(-steps // (sum(broker.is_active for broker in self._brokers) or len(self._brokers)))
        for broker in self._brokers:
            broker.session.want_window(share)

    def _join(self, timeout_s: float) -> None:
        began, had_first = connection.now(), False
        deadline, say_at = began + timeout_s, began + SAY_WAITING_S
        try:
            while any(broker.session.state is LearnerSessionState.JOINING for broker in self._brokers):
                if not had_first and any(broker.is_active for broker in self._brokers):
                    had_first, deadline = True, min(deadline, connection.now() + _OTHER_BROKERS_S)
                if connection.now() > deadline:
                    if had_first:
                        missing = ", ".join(broker.link.name for broker in self._brokers if not broker.is_active)
                        log.warning("going on without %s: the others of %s answer", missing, self.endpoint)
                        break
                    raise self._brokers[0].link.why_silent(timeout_s)
                if not had_first and (now := connection.now()) > say_at:
                    say_at += SAY_WAITING_S
                    for broker in self._brokers:
                        why = broker.link.why_silent(round(now - began))
                        log.warning("%s (waits for at most %.0f s)", why, timeout_s)
                check_stop()
                self.pump(0.05)
            while self._rounds is not None and (absent := self._rounds.waits_for()):
                if connection.now() > began + timeout_s:
                    named = ", ".join(map(str, absent))
                    raise UnreachableError(f"rank {named}", "the stream of rank 0", timeout_s)
                check_stop()
                self.pump(0.05)
        except BaseException:
            self.close()
            raise

    def _commit(self, *, at_once: bool, lag: int = 0) -> None:
        """Settle all batches but those of the newest `lag` rounds, as far as the other ranks have committed theirs."""
        if self._turns is not None:
            newest = self._turns.round - lag
            self._turns.settle(newest if self._rounds is None else self._rounds.sessions.settled_round(newest))
        elif self._rounds is not None and not self._rounds.settle_all():
            return
        for broker in self._brokers:
            broker.commit(at_once=at_once)


def _check_options(group: str, steps_per_update: int | None, synchronous: bool, brokers: int, world_size: int) -> None:
    """Raise `ConfigError` or `ValueError` for options of a stream that contradict each other."""
    if not group or not is_group(group):
        raise ConfigError(f"{brief(group)} is no name of a consumer group; {group_rule()}", key="group")
    if group != TRAIN and (steps_per_update is not None or synchronous):
        raise ConfigError(
            f"group {group!r} publishes no weights, so it takes neither steps_per_update nor synchronous", key="group"
        )
    if steps_per_update is not None and not 0 < steps_per_update <= MOST_WINDOW_STEPS // 2:
        raise ValueError(
            f"steps_per_update = {brief(steps_per_update)} is out of bounds; give one of 1 to 2**39, or None"
        )
    if synchronous and brokers > 1:
        raise ConfigError(f"synchronous sampling has one broker, got {brokers} endpoints", key="synchronous")
    if synchronous and world_size > 1:
        raise ConfigError("synchronous sampling has one process for its learner, and no ranks", key="synchronous")


def _check_ranks(ranks: str, commit_lag: int) -> None:
    """Raise `ConfigError` for a rule for lost ranks, or a lag of commits, that cannot be."""
    if ranks not in ("shared", "fixed") or commit_lag < 0:
        said = f"ranks: {brief(ranks)}, commit_lag: {brief(commit_lag)}"
        raise ConfigError(f'{said}; give ranks "shared" or "fixed", and 0 or more for the lag', key="ranks")

"""Rank 0's rounds: its port and its sessions with the other ranks, as its stream uses them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import zmq

from headrace.learner_stub.link import connection
from headrace.learner_stub.link.ranks import RankPort
from headrace.learner_stub.streaming.broker_stream import BrokerStream
from headrace.learner_stub.streaming.rank_sessions import RankSessions
from headrace.learner_stub.streaming.ready_batches import Turns
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import RefusedError
from headrace.schemas.messages import LearnerWelcome, Ranks
from headrace.schemas.peers.fleet_address import SAY_WAITING_S

log = logging.getLogger("headrace.learner")


class RankRounds:
    """The rounds of rank 0, which serves the other ranks at `port`.

    - turns: those of automatic commits, which wait until every rank has committed its part of a round. None: the user's
      commits settle all that was handed out.
    - is_fixed: as of `RankSessions`.
    """

    def __init__(self, port: RankPort, turns: Turns | None, *, is_fixed: bool) -> None:
        self._port = port
        lag = turns.lag if turns is not None else None
        self.sessions = RankSessions(port.own, is_fixed=is_fixed, commit_lag=lag)
        self._waits_since: float | None = None
        self._say_at = 0.0

    def waits_for(self) -> list[int]:
        """Return the ranks without which no round can begin. Log them every ten seconds."""
        ranks, now = self.sessions.waits_for(), connection.now()
        if not ranks:
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since, self._say_at = now, now + SAY_WAITING_S
        elif now >= self._say_at:
            self._say_at = now + SAY_WAITING_S
            named, of = ", ".join(map(str, ranks)), self.sessions.own.world_size
            log.warning("waiting for rank %s of %d (%.0f s)", named, of, now - self._waits_since)
        return ranks

    def share(self, batches: Sequence[ChunkBatch], count: int) -> list[ChunkBatch]:
        """Begin a round. Send the other ranks their batches, and return those of rank 0."""
        own = self.sessions.share(batches, count)
        self.flush()
        return own

    def settle_all(self) -> bool:
        """Count all that the ranks got as trained on. Return False while batches of a lost rank wait for their turn."""
        if self.sessions.to_give_again:
            log.warning("the commit waits: a lost rank's batches come in the next round")
            return False
        self.sessions.settle_all()
        return True

    def check_position(self) -> None:
        """Raise `RefusedError` while no position can say which batches were trained on."""
        if count := self.sessions.to_give_again:
            detail = f"a rank was lost with {count} batches, which come in the next round"
            raise RefusedError("rank_lost", f"{detail}; take the position after it")

    def tell_status(self) -> None:
        """Tell the ranks what rank 0 knows of its fleet: it may say nothing for long now."""
        self.sessions.tell_status()
        self.flush()

    def told(self) -> Ranks:
        """Return what rank 0 tells the broker of itself."""
        return self._port.own

    def pump(self, brokers: Sequence[BrokerStream]) -> None:
        """Take what the other ranks have sent, and send what is due. `brokers` know what they are told of the fleet."""
        now = connection.now()
        sessions = [broker.session for broker in brokers]
        self.sessions.facts = LearnerWelcome.model_construct(
            fleet_id=sessions[0].fleet_id,
            epoch=max(1, *(session.epoch for session in sessions)),
            spaces=next((session.spaces for session in sessions if session.spaces), {}),
            published=max(broker.newest for broker in brokers),
        )
        self.sessions.exhausted = all(session.exhausted for session in sessions)
        for peer, message in self._port.messages():
            self.sessions.receive(peer, message, now)
        self.sessions.tick(now)
        self.flush()

    def flush(self) -> None:
        """Send what is due."""
        for peer, content in self.sessions.take_outbox():
            if not self._port.send(peer, content):
                self.sessions.gone(peer, connection.now())

    def watch(self, poller: zmq.Poller) -> bool:
        """Let a poller wait for the next message of a rank. Return whether one has come already."""
        return self._port.watch(poller)

    def close(self, why: str) -> None:
        """Tell the other ranks that no batch comes any more, and `why` if the fleet has ended. Close the port."""
        if self._port.usable:
            self.sessions.end(why)
            self.flush()
        self._port.close()

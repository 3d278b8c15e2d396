"""Rank 0's sessions with the other ranks: who gets which batch, and what is settled."""

from __future__ import annotations

from typing import Any

import pytest
from learner.conftest import _make_batch

from headrace.learner_stub.streaming.rank_sessions import ENDED, LOST_S, RankSessions
from headrace.learner_stub.streaming.ready_batches import Turns
from headrace.schemas.accounts.ledger import HeldBatch, Settled
from headrace.schemas.chunks.batch import ChunkBatch, read_batch_header
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.frames.wire import decode_header
from headrace.schemas.messages import (
    Commit,
    Fenced,
    LearnerHello,
    LearnerWelcome,
    Ranks,
    Reject,
    SourcePosition,
    Status,
)


def batch(steps: int = 1) -> ChunkBatch:
    return _make_batch([steps], [ChunkEnd.TERMINATED])


class Zero:
    """Rank 0's sessions, and what each connection has heard."""

    def __init__(self, world_size: int = 2, *, is_fixed: bool = False, commit_lag: int | None = 0) -> None:
        own = Ranks(rank=0, world_size=world_size, secret="own")
        self.world_size = world_size
        self.sessions = RankSessions(own, is_fixed=is_fixed, commit_lag=commit_lag)
        self.sessions.facts = LearnerWelcome(fleet_id="f", epoch=1)

    def hello(self, peer: bytes, token: str, rank: int = 1, **more: Any) -> list[Any]:
        told = Ranks(rank=rank, world_size=more.pop("world_size", self.world_size), secret=more.pop("secret", "own"))
        self.sessions.receive(peer, LearnerHello(token=token, channel="stream", ranks=told, **more), 0.0)
        return self.heard(peer)

    def commit(self, peer: bytes, seq: int, **more: Any) -> None:
        self.sessions.receive(peer, Commit(epoch=1, position=[place(seq)], **more), 0.0)

    def heard(self, peer: bytes) -> list[Any]:
        """Return what a connection was sent: the number of each batch, and other messages."""
        out = [content for to, content in self.sessions.take_outbox() if to == peer]
        return [seq_of(it) if isinstance(it, list) else it for it in out if not isinstance(it, Status)]

    def lose(self, peer: bytes) -> None:
        self.sessions.gone(peer, 0.0)
        self.sessions.tick(LOST_S + 1)

    def round_of(self, *steps: int) -> list[ChunkBatch]:
        return self.sessions.share([batch(it) for it in steps], len(steps) // self.world_size)


def seq_of(frames: list[Any]) -> int:
    return read_batch_header(decode_header(frames)[1]).seq


def place(seq: int) -> SourcePosition:
    made = batch()
    return SourcePosition(slot=made.slot, incarnation=made.incarnation, settled=Settled(seq=seq))


def key() -> str:
    return f"{batch().slot}/{batch().incarnation}"


def test_shares_differ_by_the_largest_batch_at_most() -> None:
    zero = Zero()
    zero.hello(b"a", "one")
    total = own = 0
    for i in range(50):
        steps = [1 + (7 * i + 3 * n) % 20 for n in range(4)]
        own += sum(it.steps for it in zero.round_of(*steps))
        total += sum(steps)
        zero.commit(b"a", 2 * (i + 1))
        assert abs(total - 2 * own) <= 20


def test_a_lost_rank_comes_back_with_the_share_of_the_others() -> None:
    zero = Zero()
    zero.hello(b"a", "one")
    zero.lose(b"a")
    for _ in range(10):
        zero.sessions.share([batch(10)], 1)
    zero.hello(b"b", "two")
    got = [zero.round_of(1, 9)[0].steps for _ in range(2)]
    assert sorted(got) == [1, 9], "not the largest batches until it has caught up"


def test_another_world_size_is_refused() -> None:
    (answer,) = Zero().hello(b"a", "one", world_size=3)
    assert isinstance(answer, Reject)
    assert answer.code == "world_size"
    assert "world_size 3, and rank 0 has 2" in answer.detail


def test_a_rank_of_an_earlier_rank_0_is_fenced() -> None:
    zero = Zero()
    (answer,) = zero.hello(b"a", "one", secret="old")
    assert isinstance(answer, Fenced)
    assert zero.sessions.waits_for() == [1]


def test_the_newer_process_of_a_rank_wins_and_the_older_cannot_come_back() -> None:
    zero = Zero()
    zero.hello(b"a", "one")
    zero.round_of(1, 1)
    zero.heard(b"a")
    zero.sessions.receive(
        b"b", LearnerHello(token="two", channel="stream", ranks=Ranks(rank=1, world_size=2, secret="own")), 0.0
    )
    out = zero.sessions.take_outbox()
    assert [type(content) for to, content in out if to == b"a"] == [Fenced]
    assert [seq_of(it) for to, it in out if to == b"b" and isinstance(it, list)] == [1]
    for peer, epoch in ((b"c", 1), (b"d", 0)):
        assert [type(it) for it in zero.hello(peer, "one", epoch=epoch)] == [Fenced]
    zero.commit(b"b", 1)
    assert zero.heard(b"b") == [], "it still is the rank"
    assert zero.sessions.settled_round(1) == 1


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_lost_rank_s_batches_wait_for_another_one(is_fixed: bool) -> None:
    zero = Zero(is_fixed=is_fixed)
    zero.hello(b"a", "one")
    zero.round_of(1, 1)
    assert zero.sessions.settled_round(1) == 0
    zero.sessions.gone(b"a", 0.0)
    zero.sessions.tick(LOST_S - 1)
    assert zero.sessions.waits_for() == [1]
    zero.sessions.tick(LOST_S + 1)
    assert zero.sessions.to_give_again == 1
    assert zero.sessions.settled_round(1) == 0
    if is_fixed:
        assert zero.sessions.waits_for() == [1]
        zero.heard(b"b")
        assert zero.hello(b"b", "two")[1:] == [1]
        zero.commit(b"b", 1)
        assert zero.sessions.settled_round(1) == 1
    else:
        assert zero.sessions.new_batches(1) == 0
        assert len(zero.sessions.share([], 1)) == 1
        assert zero.sessions.settled_round(1) == 0, "rank 0 has not committed it"
        assert zero.sessions.settled_round(2) == 2


def test_after_a_lost_connection_a_rank_gets_what_it_has_not() -> None:
    zero = Zero(commit_lag=3)
    zero.hello(b"a", "one")
    for _ in range(3):
        zero.round_of(1, 1)
    zero.sessions.gone(b"a", 0.0)
    zero.sessions.take_outbox()
    assert zero.hello(b"b", "one", epoch=1, position=[place(1)])[1:] == [2, 3]
    assert zero.sessions.settled_round(3) == 1, "its position counts"
    held = {key(): [HeldBatch(seq=2, steps=1, chunks=1)]}
    assert zero.hello(b"c", "one", epoch=1, position=[place(1)], held=held)[1:] == [3]


@pytest.mark.parametrize("commit_lag", [0, None])
def test_rank_0_waits_for_a_slow_rank_unless_that_needs_more(commit_lag: int | None) -> None:
    zero = Zero(commit_lag=commit_lag)
    zero.hello(b"a", "one")
    for _ in range(3):
        assert zero.sessions.waits_for() == []
        zero.round_of(1, 1)
    assert zero.sessions.waits_for() == [1]
    zero.commit(b"a", 0, waiting=True, in_hand=2)
    assert zero.sessions.waits_for() == [1], "one is still on its way"
    zero.commit(b"a", 0, waiting=True, in_hand=3)
    assert zero.sessions.waits_for() == []
    zero.commit(b"a", 1)
    assert zero.sessions.waits_for() == []
    zero.round_of(1, 1)
    assert zero.sessions.waits_for() == [1]
    zero.commit(b"a", 1, waiting=True, in_hand=3)
    assert zero.sessions.waits_for() == []
    zero.lose(b"a")
    assert zero.sessions.to_give_again == (3 if commit_lag == 0 else 4), "only rank 0 commits by hand"


def test_status_and_end_go_to_each_rank() -> None:
    zero = Zero(3)
    zero.hello(b"a", "one")
    zero.hello(b"b", "two", rank=2)
    zero.sessions.exhausted = True
    zero.sessions.tick(1.0)
    assert [(to, it.workers) for to, it in zero.sessions.take_outbox()] == [(b"a", 0), (b"b", 0)]  # type: ignore[union-attr]
    zero.sessions.end("the fleet was stopped")
    over = Reject(code=ENDED, detail="the fleet was stopped")
    assert zero.sessions.take_outbox() == [(b"a", over), (b"b", over)]


def test_turns_settle_what_comes_after_the_last_round_once_that_is_settled() -> None:
    turns, settled = Turns(1), list[str]()
    turns.later.append(lambda: settled.append("first"))
    turns.begin()
    turns.later.append(lambda: settled.append("end"))
    turns.settle(0)
    assert settled == []
    turns.settle(1)
    assert settled == ["first", "end"]

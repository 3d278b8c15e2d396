"""Ranks of one consumer group, each a process: they share its batches, and none is lost or given twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.run.key_pairs import make_keys
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.link import connection
from headrace.learner_stub.streaming import broker_stream
from headrace.learner_stub.streaming.rank_sessions import MOST_AHEAD
from headrace.schemas.credentials.keys import read_broker_keys, read_client_keys
from headrace.schemas.errors import ConfigError, RefusedError, UnreachableError
from headrace.schemas.messages import LearnerHello, Ranks
from support.pipeline.delivery import BrokerThread, Envs, Feeder, Process, RawPeer, StartBroker, StartFeeder
from support.pipeline.rank_process import told
from support.waiting import TIMEOUT_S, wait_until

COUNT = 12

StartRank = Callable[..., "Rank"]


class Rank(Process):
    """Another rank than 0 as a process; `lines` are what it wrote."""

    def __init__(self, endpoint: str, file: Path, **options: Any) -> None:
        words = [endpoint, str(file), orjson.dumps(options).decode()]
        command = [sys.executable, "-m", "support.pipeline.rank_process", *words]
        super().__init__(subprocess.Popen(command, cwd=Path(__file__).parents[1]), file)

    def lines(self) -> list[dict[str, Any]]:
        text = self.log.read_bytes() if self.log.exists() else b""
        return [orjson.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def batches(self) -> list[Any]:
        return [batch for line in self.lines() for batch in line.get("round", ())]

    def last(self, key: str) -> str:
        wait_until(lambda: any(key in line for line in self.lines()), f"the rank's word on {key}")
        return str(self.lines()[-1][key])


@pytest.fixture
def start_rank(stack: ExitStack, tmp_path: Path) -> StartRank:
    """`start_rank(broker, name, rank=1, world_size=2, ...)`."""

    def start(broker: BrokerThread, name: str = "1", **options: Any) -> Rank:
        options = {"rank": 1, "world_size": 2, "connect_timeout_s": TIMEOUT_S, **options}
        return stack.enter_context(Rank(broker.endpoints.learner, tmp_path / f"rank-{name}", **options))

    return start


def open_zero(stack: ExitStack, broker: BrokerThread, **options: Any) -> EpisodeStream:
    options = {"rank": 0, "world_size": 2, "connect_timeout_s": TIMEOUT_S, **options}
    return stack.enter_context(EpisodeStream(broker.endpoints.learner, **options))


def absent_rank_0(stack: ExitStack, broker: BrokerThread, world_size: int) -> None:
    """Make the broker name a rank 0 that answers nobody."""
    peer = stack.enter_context(RawPeer(broker.endpoints.learner, "learner"))
    ranks = Ranks(rank=0, world_size=world_size, host="127.0.0.1", port=9, secret="dead")
    peer.send(LearnerHello(token="dead", channel="stream", ranks=ranks).frames())
    wait_until(lambda: broker.ask(lambda asked: asked.core.learners.ranks) is not None, "the dead rank 0")


def read_rounds(stream: EpisodeStream, count: int) -> list[Any]:
    """Return what rank 0 gets in `count` rounds, each within the time limit."""
    got: list[Any] = []
    for _ in range(count):
        batches = stream.round_of(1, TIMEOUT_S)
        assert len(batches) == 1
        got.append(told(batches[0]))
    return got


def feed(
    start_feeder: StartFeeder, broker: BrokerThread, count: int = COUNT, **options: Any
) -> tuple[Feeder, list[Any]]:
    """A worker, and what makes its batches known."""
    batches = Envs(7).fragments(count)
    return start_feeder(broker.endpoints.worker, batches, **options), [told(batch) for batch in batches]


def content(batches: list[Any]) -> list[bytes]:
    return sorted(orjson.dumps(batch[1:]) for batch in batches)


@pytest.mark.parametrize("auto_commit", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_all_batches_in_equal_numbers(
    broker: BrokerThread,
    stack: ExitStack,
    start_feeder: StartFeeder,
    start_rank: StartRank,
    world_size: int,
    auto_commit: bool,
) -> None:
    feeder, shipped = feed(start_feeder, broker)
    options = {"world_size": world_size, "auto_commit": auto_commit}
    others = [start_rank(broker, str(rank), rank=rank, **options) for rank in range(1, world_size)]
    zero = open_zero(stack, broker, **options)
    rounds = COUNT // world_size
    own = read_rounds(zero, rounds)
    wait_until(lambda: all(len(other.batches()) == rounds for other in others), "the others' batches")
    if not auto_commit:
        assert not feeder.all_settled()
        zero.commit()
    assert zero.round_of(1, 0.2) == []
    wait_until(lambda: (zero.pump(0.01), zero.next(0.05), feeder.all_settled())[-1], "the settlement")
    assert content(own + [batch for other in others for batch in other.batches()]) == content(shipped)
    zero.close()
    for other in others:
        assert other.last("ended") == "rank 0 has closed its stream"
        assert other.wait() == 0


def test_the_other_ranks_learn_from_rank_0_how_the_fleet_ended(
    broker: BrokerThread, stack: ExitStack, start_rank: StartRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_stream, "_QUIET_S", 0.0)
    other = start_rank(broker, "1", rank=1, world_size=2)
    zero = open_zero(stack, broker, run_dir=tmp_path)
    broker.stop()
    (tmp_path / "fleet.json").write_bytes(orjson.dumps({"state": "stopped", "at_goal": True}))
    wait_until(lambda: (zero.pump(0.05), zero.ended)[1], "the end")
    zero.close()
    end = f"the fleet in {tmp_path} reached its goal; go on with `headrace up --resume {tmp_path}`"
    assert (zero.ended, other.last("ended")) == (end, end)
    assert other.wait() == 0


@pytest.mark.parametrize("ranks", ["shared", "fixed"])
def test_batches_of_a_killed_rank_are_given_again(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, start_rank: StartRank, ranks: str
) -> None:
    feeder, shipped = feed(start_feeder, broker)
    one = start_rank(broker, ranks=ranks, auto_commit=False)
    zero = open_zero(stack, broker, ranks=ranks, auto_commit=False)
    own = read_rounds(zero, 3)
    wait_until(lambda: len(one.batches()) == 3, "rank 1's batches")
    one.signal(signal.SIGKILL)
    one.wait()
    if ranks == "shared":
        wait_until(lambda: zero._rounds is None or (zero.pump(0.05), zero._rounds.sessions.pool)[-1], "the loss")
        with pytest.raises(RefusedError, match="a rank was lost with 3 batches, which come in the next round"):
            zero.position()
        own += read_rounds(zero, COUNT - 3)
        assert content(own) == content(shipped)
    else:
        wait_until(lambda: (zero.pump(0.05), zero._rounds and zero._rounds.waits_for())[-1], "the loss")
        assert zero.round_of(1, 0.3) == []
        again = start_rank(broker, "again", ranks=ranks, auto_commit=False)
        own += read_rounds(zero, COUNT // 2 - 3)
        wait_until(lambda: len(again.batches()) == COUNT // 2, "the batches of rank 1")
        assert again.batches()[:3] == one.batches()
        assert content(own + again.batches()) == content(shipped)
    zero.commit()
    wait_until(lambda: (zero.pump(0.01), feeder.all_settled())[-1], "the settlement")


def test_rank_0_waits_for_a_slow_rank_where_its_user_commits_by_hand(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, start_rank: StartRank
) -> None:
    feed(start_feeder, broker)
    one, zero = start_rank(broker, auto_commit=False), open_zero(stack, broker, auto_commit=False)
    assert zero._rounds is not None
    rank = zero._rounds.sessions._ranks[1]
    one.last("open")
    one.signal(signal.SIGSTOP)
    read_rounds(zero, MOST_AHEAD)
    while zero.round_of(1, 0.3):
        assert zero.delivered <= MOST_AHEAD + 1
    one.signal(signal.SIGCONT)
    read_rounds(zero, COUNT // 2 - zero.delivered)
    wait_until(lambda: (zero.pump(0.01), rank.trained == COUNT // 2)[-1], "the word of rank 1")
    assert len(rank.uncommitted) == COUNT // 2


def test_a_newer_process_of_a_rank_ends_the_older_one(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, start_rank: StartRank
) -> None:
    older = start_rank(broker, "older")
    zero = open_zero(stack, broker)
    wait_until(lambda: (zero.pump(0.02), older.lines())[-1], "the older one")
    newer = start_rank(broker, "newer")
    wait_until(lambda: (zero.pump(0.02), newer.lines())[-1], "the newer one")
    wait_until(lambda: (zero.pump(0.02), len(older.lines()) > 1)[-1], "the end of the older one")
    assert "a newer process has taken over rank 1; this one must stop" in older.last("error")


def test_a_new_rank_0_fences_the_others_and_gets_what_was_not_committed(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, start_rank: StartRank
) -> None:
    _, shipped = feed(start_feeder, broker)
    one, first = start_rank(broker, auto_commit=False), open_zero(stack, broker, auto_commit=False)
    read_rounds(first, 2)
    wait_until(lambda: len(one.batches()) == 2, "rank 1's batches")
    assert first._rounds is not None
    first._rounds._port.close()  # as a kill does, without a word of the end
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_zero, stack, broker, auto_commit=False)
        assert "rank 0 is a new process; start this rank again too" in one.last("error")
        again = start_rank(broker, "next", auto_commit=False)
        later = opening.result()
    own = read_rounds(later, 2)
    wait_until(lambda: len(again.batches()) == 2, "rank 1's batches")
    assert content(own + again.batches()) == content(shipped[:4])


def test_another_world_size_is_refused_where_it_is_asked(
    broker: BrokerThread, stack: ExitStack, start_rank: StartRank
) -> None:
    absent_rank_0(stack, broker, world_size=3)
    one = start_rank(broker)
    assert "rank 1 has world_size 2, and rank 0 has 3; give all ranks the same" in one.last("error")


def test_rank_0_names_the_ranks_that_are_missing(broker: BrokerThread, stack: ExitStack) -> None:
    with pytest.raises(UnreachableError, match="no rank 1, 2 answers at the stream of rank 0"):
        open_zero(stack, broker, world_size=3, connect_timeout_s=0.5)


def test_a_rank_that_heard_of_a_dead_rank_0_joins_the_next_one(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, start_rank: StartRank
) -> None:
    _, shipped = feed(start_feeder, broker, 2)
    absent_rank_0(stack, broker, world_size=2)
    one = start_rank(broker, connect_timeout_s=60.0)
    zero = open_zero(stack, broker)
    own = read_rounds(zero, 1)
    wait_until(lambda: len(one.batches()) == 1, "rank 1's batch")
    assert content(own + one.batches()) == content(shipped)


def test_rank_0_tells_the_spaces_before_its_user_goes_elsewhere(
    broker: BrokerThread, stack: ExitStack, start_feeder: StartFeeder, start_rank: StartRank
) -> None:
    one, zero = start_rank(broker, spaces=True), open_zero(stack, broker)
    feed(start_feeder, broker)
    zero.spaces(timeout_s=TIMEOUT_S)
    assert "Discrete" in one.last("spaces"), "and rank 0 was not pumped again"


def test_ranks_share_the_batches_of_two_brokers(
    start_broker: StartBroker, stack: ExitStack, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    endpoints, feeders, shipped = [], [], []
    for index in range(2):
        (folder := tmp_path / str(index)).mkdir()
        broker = start_broker(folder, f"pair.{index}", count=2, index=index)
        endpoints.append(broker.endpoints.learner)
        batches = Envs(index).fragments(COUNT // 2)
        feeders.append(start_feeder(broker.endpoints.worker, batches, slot=index, fleet_id=f"pair.{index}"))
        shipped += [told(batch) for batch in batches]
    options = {"world_size": 2, "connect_timeout_s": TIMEOUT_S}
    one = stack.enter_context(Rank(" ".join(endpoints), tmp_path / "rank-1", rank=1, **options))
    zero = stack.enter_context(EpisodeStream(endpoints, rank=0, **options))
    own = read_rounds(zero, COUNT // 2)
    wait_until(
        lambda: (zero.pump(0.01), zero.next(0.05), all(feeder.all_settled() for feeder in feeders))[-1], "the end"
    )
    assert content(own + one.batches()) == content(shipped)
    assert {batch[0] for batch in own} == {batch[0] for batch in one.batches()} == {0, 1}
    assert {place["fleet_id"] for place in zero.position()} == {"pair.0", "pair.1"}


@pytest.mark.parametrize("group", ["train", "record"])
def test_groups_and_ranks_read_with_the_learners_key(
    start_broker: StartBroker,
    stack: ExitStack,
    start_feeder: StartFeeder,
    start_rank: StartRank,
    tmp_path: Path,
    group: str,
) -> None:
    """The key is the learner's: a broker that took the role of a HELLO for that of its key refused both."""
    folder = tmp_path / "keys"
    make_keys(folder)
    broker = start_broker(keys=read_broker_keys(folder))
    _, shipped = feed(start_feeder, broker, keys=read_client_keys(folder, "worker"))
    one = start_rank(broker, keys=str(folder), group=group)
    zero = open_zero(stack, broker, keys=folder, group=group)
    own = read_rounds(zero, COUNT // 2)
    wait_until(lambda: len(one.batches()) == COUNT // 2, "rank 1's batches")
    assert content(own + one.batches()) == content(shipped)


def test_a_rank_other_than_0_publishes_no_weights(broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_RANKS", {})
    connection.note_rank(broker.endpoints.learner, 1)
    with pytest.raises(ConfigError, match="rank 0 publishes the weights, and this is rank 1"):
        WeightPublisher(broker.endpoints.learner)


def test_an_interrupt_ends_the_wait_of_a_rank(broker: BrokerThread, stack: ExitStack, start_rank: StartRank) -> None:
    one, zero = start_rank(broker), open_zero(stack, broker)
    wait_until(lambda: (zero.pump(0.02), one.lines())[-1], "rank 1")
    one.signal(signal.SIGINT)
    assert one.last("error") == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 2, "world_size": 2}, "rank = 2 of world_size = 2 is none of"),
        ({"rank": -1, "world_size": 2}, "rank = -1 of world_size = 2"),
        ({"rank": 0, "world_size": 0}, "world_size = 0"),
        ({"rank": "one", "world_size": 2}, "rank = 'one'"),
        ({"rank": 0, "world_size": 2, "synchronous": True}, "synchronous sampling has one process"),
        ({"rank": 0, "world_size": 2.5}, "world_size = 2.5"),
        ({"rank": 0, "world_size": 2, "ranks": "loose"}, "ranks: 'loose'"),
        ({"commit_lag": -1}, "commit_lag"),
    ],
)
def test_ranks_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EpisodeStream("tcp://127.0.0.1:1", connect_timeout_s=0.5, **options)


def test_the_environment_tells_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="rank = 3 of world_size = 2"):
        EpisodeStream("tcp://127.0.0.1:1", rank="env")

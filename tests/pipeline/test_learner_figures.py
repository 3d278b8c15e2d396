"""A learner's measures of itself, up to the broker's gauges: its time by part, and the lag of its batches."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.sessions.core import BrokerCore
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.learner_stub.link import connection
from headrace.learner_stub.link.time_spent import NOT_MEASURED, TimeSpent
from headrace.schemas.accounts.lag_buckets import LAG_BOUNDS, LAG_BUCKETS, LAG_LABELS
from headrace.schemas.accounts.redis_keys import CONSUMED_LAG, LEARNER_TIME, labelled
from headrace.schemas.basics.headrace_version import program_name
from headrace.schemas.basics.process_usage import torch_threads
from headrace.schemas.frames.wire import Buffer, decode
from headrace.schemas.messages import Commit, LearnerFigures, LearnerHello, Status, WorkerHello, read
from headrace.schemas.messages.learner_messages import LEARNER_PARTS
from support.pipeline.delivery import FLEET, BrokerThread, Envs, StartBroker, StartFeeder
from support.waiting import TIMEOUT_S, wait_until

WEIGHTS = {"w": np.zeros(3, np.float32)}


class Clock:
    """A clock that the test moves, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def in_a_thread(act: object) -> None:
    thread = threading.Thread(target=act)  # type: ignore[arg-type]
    thread.start()
    thread.join(TIMEOUT_S)


def cumulated(counts: list[int]) -> dict[str, float]:
    return {labelled(CONSUMED_LAG, "le", le): sum(counts[: i + 1]) for i, le in enumerate(LAG_LABELS)}


def consumed(broker: BrokerThread) -> dict[str, float]:
    return broker.ask(lambda asked: asked.core.learners.measures.consumed_lag())


def shares(broker: BrokerThread) -> dict[str, float]:
    gauges = broker.report().gauges
    return {name: value for name, value in gauges.items() if name.startswith(LEARNER_TIME)}


def test_the_time_parts_add_up_to_the_whole_time_of_the_stream_thread() -> None:
    clock = Clock()
    spent = TimeSpent(clock)
    assert spent.seconds() == {}
    spent.start()
    clock.now += 1.0
    with spent.part("decode"):
        clock.now += 2.0
        with spent.part("wait"):
            clock.now += 4.0
        clock.now += 8.0

    def elsewhere() -> None:
        with spent.part("publish"):
            clock.now += 16.0

    in_a_thread(elsewhere)
    with suppress(ValueError), spent.part("publish"):
        clock.now += 32.0
        raise ValueError
    assert spent.seconds() == {"wait": 4.0, "decode": 10.0, "train": 17.0, "publish": 32.0}
    in_a_thread(lambda: (spent.follow(), elsewhere()))
    assert spent.seconds()["publish"] == 48.0


def test_stream_and_publisher_measure_a_custom_learner_without_extra_code(
    start_broker: StartBroker, start_feeder: StartFeeder
) -> None:
    broker = start_broker(heartbeat_interval_s=0.1)
    start_feeder(broker.endpoints.worker, Envs(1).fragments(60), label=(1, 1))
    expected, before = [0] * LAG_BUCKETS, time.monotonic()
    with EpisodeStream(broker.endpoints.learner) as stream, WeightPublisher(broker.endpoints.learner) as weights:
        opened = time.monotonic()
        for batch in stream:
            for behind in batch.lag.tolist():
                expected[bisect_left(LAG_BOUNDS, behind)] += 1
            weights.publish(WEIGHTS)
            if stream.delivered == 60:
                break
        wait_until(lambda: (stream.pump(), consumed(broker) == cumulated(expected))[1], "the lag of all steps")
        assert sum(expected[2:]) > 0 < expected[0], "steps of several lags"

        def told() -> dict[str, float]:
            stream.pump()
            return shares(broker)

        found = wait_until(told, "shares of the learner's time")
        assert found.keys() == {labelled(LEARNER_TIME, "part", part) for part in LEARNER_PARTS}
        assert sum(found.values()) == pytest.approx(1.0)
        earliest = time.monotonic()
        seconds = connection.shared(stream.token).time_spent.seconds()
        assert earliest - opened <= sum(seconds.values()) <= time.monotonic() - before
        assert min(seconds.values()) > 0, seconds
        token = stream.token
    assert connection.shared(token).time_spent is NOT_MEASURED
    wait_until(lambda: not shares(broker), "no shares of a learner that is gone")
    assert consumed(broker) == cumulated(expected)


def test_a_stream_in_which_its_user_waits_says_so_with_each_heartbeat(start_broker: StartBroker) -> None:
    broker = start_broker(heartbeat_interval_s=0.1)

    def waiting() -> bool:
        lease = broker.ask(lambda asked: asked.core.learners.lease)
        return lease is not None and lease.waiting

    with EpisodeStream(broker.endpoints.learner) as stream:
        for _ in range(4):
            assert stream.next(1.1) is None
            assert waiting(), "two heartbeats were due meanwhile"
        stream.pump()
        wait_until(lambda: (stream.pump(), not waiting())[1], "it does not wait any more")


class Learner:
    """A learner at a core, which says what it measured of itself."""

    def __init__(self, core: BrokerCore, token: str, epoch: int = 0) -> None:
        self.core, self.peer = core, b"l" + token.encode()
        core.receive(self.peer, LearnerHello(token=token, channel="stream", epoch=epoch), 0.0)

    def tells(self, *counts: int, now: float = 1.0, **seconds: float) -> None:
        counted = [*counts, *[0] * (LAG_BUCKETS - len(counts))]
        spent = dict.fromkeys(LEARNER_PARTS, 0.0) | seconds
        figures = LearnerFigures(consumed_lag=counted, time_spent=spent)
        message = read(Commit, decode(Commit(epoch=1, figures=figures).frames()).header)
        self.core.receive(self.peer, message, now)

    @property
    def steps(self) -> float:
        return self.core.learners.measures.consumed_lag()[labelled(CONSUMED_LAG, "le", "+Inf")]

    @property
    def shares(self) -> list[float]:
        return list(self.core.learners.measures.time_share().values())


def test_lag_counts_go_on_with_a_new_learner_and_omit_steps_before_this_broker() -> None:
    first = BrokerCore("f", BrokerLimits())
    learner = Learner(first, "a")
    learner.tells(10)
    learner.tells(12, 3)
    assert learner.steps == 15
    second = BrokerCore("f", BrokerLimits(), first.state)
    learner = Learner(second, "a", epoch=1)
    learner.tells(20, 3)
    assert learner.steps == 0
    learner.tells(20, 8)
    assert learner.steps == 5
    newer = Learner(second, "b")
    newer.tells(7)
    assert newer.steps == 12
    learner.tells(90, 90)
    assert newer.steps == 12, "an older learner counts no more"


def test_time_shares_cover_the_last_seconds_or_a_whole_long_update() -> None:
    learner = Learner(BrokerCore("f", BrokerLimits()), "a")
    learner.tells(wait=1.0)
    assert learner.shares == []
    learner.tells(wait=1.0, train=300.0)
    assert learner.shares == [0.0, 0.0, 1.0, 0.0]
    for second in range(1, 11):
        learner.tells(wait=1.0 + 0.75 * second, decode=0.25 * second, train=300.0)
    assert learner.shares == [0.75, 0.25, 0.0, 0.0]
    for tick in range(1, 1001):
        learner.tells(wait=8.5, decode=2.5, train=300.0, publish=tick / 100)
    assert learner.shares == pytest.approx([0.0, 0.0, 0.0, 1.0], abs=0.03)
    Learner(learner.core, "b")
    assert learner.shares == []


def test_figures_of_another_version_count_for_nothing_and_later_ones_still_count() -> None:
    learner = Learner(BrokerCore("f", BrokerLimits()), "a")
    learner.tells(100, wait=1.0)
    learner.core.receive(learner.peer, Commit(epoch=1, figures=LearnerFigures(consumed_lag=[1, 2])), 1.0)
    learner.core.receive(learner.peer, Commit(epoch=1, figures=LearnerFigures(time_spent={"sleep": 9.0})), 1.0)
    assert learner.steps == 100
    learner.tells(130, wait=3.0)
    assert (learner.steps, learner.shares, learner.core.refusals.total) == (130, [1.0, 0.0, 0.0, 0.0], 0)


def test_a_commit_without_figures_has_no_figures_field() -> None:
    assert "figures" not in decode(Commit(epoch=1).frames()).header


def test_the_lag_of_a_batch_after_markers_counts_versions_published_in_between(
    broker: BrokerThread, start_feeder: StartFeeder
) -> None:
    """An unreadable batch leaves a hole. The next batch follows the markers of the episodes that the hole ended."""

    def damage(seq: int, frames: list[Buffer]) -> list[Buffer]:
        if seq == 2:
            frames[2] = bytes([bytes(frames[2])[0] ^ 1]) + bytes(frames[2])[1:]
        return frames

    start_feeder(broker.endpoints.worker, Envs(1, ends=0.3, fails=0.0).fragments(3, 20), label=(1, 0), alter=damage)
    with EpisodeStream(broker.endpoints.learner) as stream, WeightPublisher(broker.endpoints.learner) as weights:
        sizes = []
        while (batch := stream.next(TIMEOUT_S)) is not None:
            sizes.append(batch.steps)
            if len(sizes) == 3:
                break
            weights.publish(WEIGHTS)
    assert sizes[0] > 0 == sizes[1] < sizes[2], "a batch, markers, and a batch"
    assert batch is not None
    assert batch.newest == (1, 2)


@pytest.mark.parametrize(
    ("host", "workers", "here"),
    [("box", ("box", "box", "other"), 2), ("box", ("other",), 0), ("box", (), 0), ("", ("", "box"), 0)],
)
def test_a_heartbeat_tells_the_learner_how_many_workers_share_its_host(
    host: str, workers: tuple[str, ...], here: int
) -> None:
    core = BrokerCore("f", BrokerLimits(heartbeat_interval_s=1.0))
    for slot, where in enumerate(workers):
        hello = WorkerHello(fleet_id="f", token=str(slot), slot=slot, incarnation=1, host=where)
        core.receive(b"w%d" % slot, hello, 0.0)
    core.receive(b"l", LearnerHello(token="l", channel="stream", host=host), 0.0)
    core.take_outbox()
    core.tick(1.0)
    (status,) = [send.content for send in core.take_outbox() if isinstance(send.content, Status)]
    assert (status.workers, status.workers_here) == (len(workers), here)


def test_a_stream_says_who_its_learner_is(start_broker: StartBroker) -> None:
    broker = start_broker(heartbeat_interval_s=0.1)
    with EpisodeStream(broker.endpoints.learner):
        lease = broker.report().lease
        assert (lease["host"], lease["pid"], lease["connected"]) == (platform.node(), os.getpid(), 1)
        assert lease["program"] == program_name()


@pytest.mark.parametrize(
    ("argv", "module", "name"),
    [
        (["/srv/ppo.py", "--token", "secret"], None, "/srv/ppo.py"),
        (["-c"], None, "python"),
        ([""], None, "python"),
        ([], None, "python"),
        (["/lib/mine/ppo.py"], "mine.ppo", "python -m mine.ppo"),
        (["/lib/mine/__main__.py"], "mine.__main__", "python -m mine"),
        (["/s\udcff\x1b.py"], None, r"/s?\x1b.py"),
        (["/" + 300 * "a" + "/ppo.py"], None, 193 * "a" + "/ppo.py"),
    ],
)
def test_the_name_of_a_program_is_its_script_or_module_without_arguments(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], module: str | None, name: str
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = ModuleSpec(module, None) if module is not None else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", argv)
    assert program_name() == name
    assert LearnerHello(token="l", channel="stream", program=name).program == name


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """A process on four cores whose torch uses as many threads as the test says, and that has not warned."""
    monkeypatch.setattr(connection, "_WARNED_OF_THREADS", set())
    monkeypatch.setattr(connection, "own_cores", lambda: 4)
    return Threads(monkeypatch)


class Threads:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def use(self, count: int | None, *, on_gpu: bool = False) -> None:
        """Let torch use so many threads; None: torch is not loaded."""
        cuda = SimpleNamespace(is_initialized=lambda: on_gpu)
        torch = None if count is None else SimpleNamespace(get_num_threads=lambda: count, cuda=cuda)
        self._patch.setitem(sys.modules, "torch", torch)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "torch uses" in record.getMessage()]


def test_a_learner_whose_torch_takes_the_cores_of_workers_is_warned_once(
    threads: Threads, caplog: pytest.LogCaptureFixture
) -> None:
    for count, workers in ((None, 2), (2, 2), (1, 9), (4, 0), (0, 2)):
        threads.use(count)
        connection.warn_of_threads(workers)
    threads.use(4, on_gpu=True)
    connection.warn_of_threads(2)
    assert torch_threads() == 0, "the broker is told so too"
    assert warnings_of(caplog) == []
    threads.use(4)
    for _ in range(3):
        connection.warn_of_threads(2)
    assert warnings_of(caplog) == [
        "torch uses 4 threads in the learner, which shares 4 cores with 2 workers: both get slower; call "
        "torch.set_num_threads(1) (at most 2), or set OMP_NUM_THREADS=1"
    ]


def test_a_stream_warns_of_threads_once_workers_share_its_host(
    threads: Threads, caplog: pytest.LogCaptureFixture, start_broker: StartBroker
) -> None:
    threads.use(4)
    broker = start_broker(heartbeat_interval_s=0.1)
    with EpisodeStream(broker.endpoints.learner) as stream:
        wait_until(lambda: (stream.pump(), stream.exhausted)[1], "a heartbeat of the broker")
        assert warnings_of(caplog) == []
        hello = WorkerHello(fleet_id=FLEET, token="w", slot=0, incarnation=1, host=platform.node())
        broker.ask(lambda asked: asked.core.receive(b"w", hello, time.monotonic()))
        wait_until(lambda: (stream.pump(), warnings_of(caplog))[1], "the warning")
    assert len(warnings_of(caplog)) == 1


def test_without_torch_a_stream_does_not_import_it() -> None:
    code = "import sys; from headrace.learner_stub import EpisodeStream; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

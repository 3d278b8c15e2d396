"""Tasks from a teacher to the workers: published once, kept over kills, told to late workers, of the newest teacher."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from headrace.broker.files.state_file import read_broker_file
from headrace.deploy.run.key_pairs import make_keys
from headrace.learner_stub import TaskPublisher, WeightPublisher, spread
from headrace.learner_stub.publishing import task_publisher
from headrace.schemas.basics.bounds import Version
from headrace.schemas.chunks.task import MOST_TASK_BYTES
from headrace.schemas.credentials.keys import read_broker_keys, read_client_keys
from headrace.schemas.errors import (
    DecodeError,
    EncodeError,
    FencedError,
    KeysRefusedError,
    RefusedError,
    UnreachableError,
)
from headrace.schemas.messages import Reject, Tasks, TasksAck, TeacherHello, read
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.runner.env_runner import EnvRunner
from support.pipeline.delivery import (
    BrokerThread,
    Feeder,
    RawPeer,
    StartBroker,
    StartFeeder,
    broker_process,
    worker_process,
)
from support.pipeline.worker_threads import AT_RANDOM, SAMPLING, WorkerThread
from support.waiting import TIMEOUT_S, wait_until

LEVEL = {"level": 3}
StartTeacher = Callable[..., TaskPublisher]


@pytest.fixture
def teach(stack: ExitStack) -> StartTeacher:
    """`teach(endpoint, ...)`: a publisher of tasks."""

    def start(endpoint: str | list[str], **options: Any) -> TaskPublisher:
        return stack.enter_context(TaskPublisher(endpoint, **{"connect_timeout_s": TIMEOUT_S, **options}))

    return start


def in_use(broker: BrokerThread) -> dict[int, Version | None]:
    """The tasks that the next resets of each worker take, as its heartbeats tell, by slot."""
    return broker.ask(lambda asked: {source.slot: source.figures.beat.tasks for source in asked.core.live()})


def told(session: WorkerSession) -> tuple[Version, list[dict[str, Any]]] | None:
    """Version and values of the tasks that a worker has got."""
    tasks = session.tasks
    return None if tasks is None else (tasks.version, [task.values for task in tasks.tasks])


def kept(run_dir: Path) -> Tasks:
    return Tasks.model_validate(orjson.loads((run_dir / "tasks.json").read_bytes())["tasks"])


# -- the way to the workers -------------------------------------------------------------------------------------------


def test_a_task_reaches_each_worker_and_one_that_comes_later(
    broker: BrokerThread, teach: StartTeacher, stack: ExitStack, tmp_path: Path
) -> None:
    def start(slot: int) -> None:
        stack.enter_context(worker_process(tmp_path, broker.endpoints.worker, slot, 1, AT_RANDOM))

    for slot in (0, 1):
        start(slot)
    wait_until(lambda: len(in_use(broker)) == 2, "two workers")
    version = teach(broker.endpoints.learner).publish(LEVEL)
    assert version == (1, 1)
    wait_until(lambda: in_use(broker) == {0: version, 1: version}, "heartbeats of both workers that tell the task")
    start(2)
    wait_until(lambda: in_use(broker) == dict.fromkeys(range(3), version), "the task at a late worker")


def test_a_distribution_arrives_as_it_was_published_and_is_taken_away(
    broker: BrokerThread, teach: StartTeacher, start_feeder: StartFeeder, tmp_path: Path
) -> None:
    feeder, teacher = start_feeder(broker.endpoints.worker), teach(broker.endpoints.learner)
    plain = {"b": [1, "x", None, True], "d": spread(1, 2)}
    given = {"a": np.float32(0.5), "c": torch.tensor(2.0), "e": np.array(3), **plain}
    feeder.session.tasks_in_use = (9, 9)
    wait_until(lambda: in_use(broker) == {0: (9, 9)}, "a heartbeat after which no worker gets the tasks again")
    assert teacher.publish([(given, 3), LEVEL, {}], group=4) == (1, 1)
    wait_until(lambda: feeder.session.tasks, "the tasks")
    tasks = feeder.session.tasks
    assert tasks == kept(tmp_path)
    assert tasks is not None
    assert [(task.values, task.weight) for task in tasks.tasks] == [
        ({"a": 0.5, "c": 2.0, "e": 3, **plain}, 3.0),
        (LEVEL, 1.0),
        ({}, 1.0),
    ]
    assert tasks.group == 4
    teacher.publish([])
    wait_until(lambda: told(feeder.session) == ((1, 2), []), "no tasks")
    assert teacher.publish(None) == (1, 3)


def test_threads_publish_one_after_another_each_with_a_version_of_its_own(
    broker: BrokerThread, teach: StartTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*told: Any) -> Tasks:
        time.sleep(0.01)
        return made(*told)

    made = Tasks.of
    monkeypatch.setattr(Tasks, "of", slow)
    teacher = teach(broker.endpoints.learner)
    with ThreadPoolExecutor(4) as threads:
        versions = list(threads.map(lambda level: teacher.publish({"level": level}), range(20)))
    assert sorted(versions) == [(1, seq) for seq in range(1, 21)]


def test_a_worker_that_has_missed_the_tasks_gets_them_after_its_next_heartbeat(
    broker: BrokerThread, teach: StartTeacher, start_feeder: StartFeeder
) -> None:
    feeder = start_feeder(broker.endpoints.worker)
    version = teach(broker.endpoints.learner).publish(LEVEL)
    wait_until(lambda: told(feeder.session) == (version, [LEVEL]), "the tasks")
    feeder.session.tasks = None  # its heartbeats told of none before either
    wait_until(lambda: told(feeder.session) == (version, [LEVEL]), "the tasks again")
    feeder.session.tasks_in_use = version
    wait_until(lambda: in_use(broker) == {0: version}, "a heartbeat that tells them")
    feeder.session.tasks = None
    beats = broker.ask(lambda asked: asked.core.live()[0].figures.beat)
    wait_until(lambda: broker.ask(lambda asked: asked.core.live()[0].figures.beat) is not beats, "another heartbeat")
    assert feeder.session.tasks is None, "no worker gets again what it has"


def test_a_worker_hands_each_publication_to_its_runner_once(
    broker: BrokerThread, teach: StartTeacher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    got: list[Version] = []
    monkeypatch.setattr(EnvRunner, "set_tasks", lambda _, tasks: got.append(tasks.version))
    teacher = teach(broker.endpoints.learner)
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, AT_RANDOM):
        for version in ((1, 1), (1, 2)):
            assert teacher.publish(LEVEL) == version
            wait_until(lambda told=version: in_use(broker) == {0: told}, "the tasks in use")  # type: ignore[misc]
    assert got == [(1, 1), (1, 2)]


def test_a_broker_hears_why_envs_refuse_their_tasks(
    broker: BrokerThread, teach: StartTeacher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def said() -> str:
        beats = broker.ask(lambda asked: [source.figures.beat for source in asked.core.live()])
        return beats[0].tasks_refused if beats else ""

    teacher, sampling = teach(broker.endpoints.learner), {**SAMPLING, "env": "CartPole-v1"}
    sampling["gym_env_vectorize_mode"] = "vector_entry_point"
    with WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path, {**AT_RANDOM, "sampling": sampling}):
        teacher.publish(LEVEL)
        wait_until(lambda: "CartPoleVectorEnv resets its envs by itself" in said(), "the sentence")
        teacher.publish(None)
        wait_until(lambda: not said(), "that it is over")


def test_a_session_ignores_older_and_equal_tasks(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    session = start_feeder(broker.endpoints.worker).session
    newer, same, older = (Tasks(version=version) for version in ((2, 1), (2, 1), (1, 9)))
    for tasks in (newer, same, older):
        session.receive(tasks, time.monotonic())
    assert session.tasks is newer


def test_a_publisher_of_weights_has_one_of_tasks(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    feeder = start_feeder(broker.endpoints.worker)
    with WeightPublisher(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S) as weights:
        assert weights.tasks is weights.tasks
        version = weights.tasks.publish(LEVEL)
        weights.publish({"w": np.zeros(3)})
        assert weights.epoch == 1
        wait_until(lambda: told(feeder.session) == (version, [LEVEL]), "the tasks")
    with pytest.raises(Exception, match="closed"):
        weights.tasks.publish(LEVEL)


def test_the_tasks_of_two_brokers_bear_one_version(
    start_broker: StartBroker, start_feeder: StartFeeder, teach: StartTeacher, tmp_path: Path
) -> None:
    """Each broker gives epochs of its own; the teacher uses the largest."""
    brokers = []
    for index in range(2):
        folder = tmp_path / f"broker-{index}"
        folder.mkdir()
        brokers.append(start_broker(folder, f"pair.{index}", count=2, index=index))
    feeders = [
        start_feeder(broker.endpoints.worker, slot=slot, fleet_id=f"pair.{slot}") for slot, broker in enumerate(brokers)
    ]
    for _ in range(3):
        teach(brokers[1].endpoints.learner)
    endpoints = [broker.endpoints.learner for broker in brokers]
    first = teach(endpoints, fleet_id="pair")
    assert first.publish(LEVEL) == (4, 1)
    for feeder in feeders:
        wait_until(lambda feeder=feeder: told(feeder.session) == ((4, 1), [LEVEL]), "the tasks")  # type: ignore[misc]
    assert teach(endpoints, fleet_id="pair").publish({}) == (5, 1)
    with pytest.raises(FencedError):
        first.publish(LEVEL)
    with pytest.raises(RefusedError, match=r"serves fleet 'pair\.([01])', not 'other\.\1'; check the endpoint"):
        teach(endpoints, fleet_id="other")


# -- teachers and brokers that end ------------------------------------------------------------------------------------


def test_a_newer_teacher_fences_the_older_one(broker: BrokerThread, teach: StartTeacher) -> None:
    first = teach(broker.endpoints.learner)
    assert first.publish(LEVEL) == (1, 1)
    second = teach(broker.endpoints.learner)
    for _ in range(2):
        with pytest.raises(FencedError, match=r"a newer publisher of tasks \(epoch 2\) has taken over"):
            first.publish(LEVEL)
    assert second.publish({}) == (2, 1)


def test_a_hello_that_is_repeated_gets_the_same_epoch(broker: BrokerThread, tmp_path: Path) -> None:
    def epoch_of(token: str) -> int:
        with RawPeer(broker.endpoints.learner) as peer:
            peer.send(TeacherHello(token=token).frames())
            return read(TasksAck, peer.receive(TIMEOUT_S).header).version[0]

    assert [epoch_of(token) for token in ("a", "a", "b", "b")] == [1, 1, 2, 2]
    assert (tmp_path / "tasks.json").stat().st_mode & 0o777 == 0o600
    assert b'"b"' not in (tmp_path / "tasks.json").read_bytes(), "the token itself is on no disk"


@pytest.mark.chaos
def test_the_tasks_and_the_epoch_outlive_a_kill_of_the_broker(
    stack: ExitStack, start_feeder: StartFeeder, teach: StartTeacher, tmp_path: Path
) -> None:
    """The first teacher goes on, a worker that joins gets its tasks, and the next teacher has a higher epoch."""

    def start() -> Any:
        process = stack.enter_context(broker_process(tmp_path))
        file = read_broker_file(tmp_path)
        assert file is not None
        return process, file.endpoints

    broker, endpoints = start()
    teacher = teach(endpoints.learner)
    version = teacher.publish(LEVEL)
    broker.signal(signal.SIGKILL)
    broker.wait()
    broker, endpoints = start()
    feeder = start_feeder(endpoints.worker)
    wait_until(lambda: told(feeder.session) == (version, [LEVEL]), "the tasks of before the kill")
    assert teacher.publish({"level": 4}) == (1, 2)
    assert teach(endpoints.learner).publish({}) == (2, 1)


def test_publish_waits_for_a_broker_that_is_away_and_says_so(
    start_broker: StartBroker,
    teach: StartTeacher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The broker comes back with another address, as after a restart of the fleet elsewhere."""
    monkeypatch.setattr(task_publisher, "SAY_WAITING_S", 0.2)
    broker = start_broker(allow_insecure=True)
    impatient = teach(broker.endpoints.learner, connect_timeout_s=0.5)
    teacher = teach(broker.endpoints.learner, run_dir=tmp_path)
    broker.stop()
    with pytest.raises(UnreachableError, match=r"no broker answers at tcp://.* after 0\.5 s"):
        impatient.publish(LEVEL)
    caplog.clear()
    published: list[Version] = []
    thread = threading.Thread(target=lambda: published.append(teacher.publish(LEVEL)))
    thread.start()
    wait_until(lambda: "waits for at most" in caplog.text, "a line that says whom it waits for")
    (tmp_path / "broker.json").unlink()  # the next broker takes another port
    with socket.create_server(("127.0.0.1", int(broker.endpoints.learner.rpartition(":")[2]))):
        again = start_broker(allow_insecure=True)
        assert again.endpoints.learner != broker.endpoints.learner
        thread.join(TIMEOUT_S)
    assert published == [(2, 1)]


def test_a_broker_that_cannot_write_the_tasks_does_not_acknowledge_them(
    broker: BrokerThread,
    teach: StartTeacher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The teacher says why, as the broker's log does."""
    monkeypatch.setattr(task_publisher, "SAY_WAITING_S", 0.5)
    teacher = teach(broker.endpoints.learner, connect_timeout_s=1.5)
    (tmp_path / "tasks.json").unlink()
    (tmp_path / "tasks.json").mkdir()
    why = r"answers, but has not kept the tasks after %s s: .*tasks\.json cannot be written \(Is a directory\)"
    with pytest.raises(UnreachableError, match=why % r"1\.5"):
        teacher.publish(LEVEL)
    assert caplog.text.count("publishers of tasks wait") == 1
    assert re.search(why % r"\d" + r" \(waits for at most", caplog.text)
    (tmp_path / "tasks.json").rmdir()
    assert teacher.publish(LEVEL) == (1, 2)


def test_damaged_tasks_are_left_out_and_no_worker_keeps_the_next_teacher_from_its_place(
    start_broker: StartBroker,
    start_feeder: StartFeeder,
    teach: StartTeacher,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing but a worker's heartbeat has the old epoch."""
    (tmp_path / "tasks.json").write_text('{"epoch": 3, "tasks"')
    broker = start_broker()
    assert "the tasks in tasks.json are damaged (ValidationError), and are left out" in caplog.text
    feeder = start_feeder(broker.endpoints.worker)
    feeder.session.tasks_in_use = (3, 9)
    wait_until(lambda: in_use(broker) == {0: (3, 9)}, "the heartbeat")
    assert teach(broker.endpoints.learner).publish({}) == (4, 1)


# -- who may publish, and what ----------------------------------------------------------------------------------------


def test_a_teacher_shows_a_learners_key_at_the_learners_port(
    start_broker: StartBroker, teach: StartTeacher, tmp_path: Path
) -> None:
    keys, strangers = tmp_path / "keys", tmp_path / "strangers"
    for folder in (keys, strangers):
        make_keys(folder)
    broker = start_broker(keys=read_broker_keys(keys))
    assert teach(broker.endpoints.learner, keys=keys).publish(LEVEL) == (1, 1)
    with WeightPublisher(broker.endpoints.learner, keys=keys) as weights:
        assert weights.tasks.publish(LEVEL) == (2, 1)
    (strangers / "broker.public").write_bytes((keys / "broker.public").read_bytes())
    with pytest.raises(KeysRefusedError):
        teach(broker.endpoints.learner, keys=strangers)
    with pytest.raises(KeysRefusedError):
        teach(broker.endpoints.worker, keys=keys)
    with RawPeer(broker.endpoints.worker, keys=read_client_keys(keys, "worker")) as worker:
        worker.send(Tasks(version=(9, 9)).frames())
        assert "TASKS is not for a broker" in read(Reject, worker.receive(TIMEOUT_S).header).detail
    assert kept(tmp_path).version == (2, 1)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (3, "publish a task such as"),
        ("level", "publish a task such as"),
        (np.array([1]), "publish a task such as"),
        ([LEVEL] * 4097, "4,097 tasks cannot be published at once; give at most 4,096"),
        ([{"level": "x" * 4000}] * 249, "249 tasks of 1,005,214 bytes as JSON; at most 1,000,000 may be published"),
        ([3], "a task is a mapping"),
        ({3: 3}, "is no printable text"),
        ({"level": float("nan")}, "is no finite number"),
        ({"level": object()}, "is no finite number"),
        ({"level": {"easy": 1}}, "only what `spread"),
        ({"level": {"spread": [10**400, 1, "fleet", "linear"]}}, "give two numbers of at most 1e"),
        ({"level": nested(9)}, "at most 8 deep"),
        ({"level": "\ud800"}, "cannot be written as JSON"),
        ({"level": "x" * MOST_TASK_BYTES}, "at most 4,096 may be published"),
        ([(LEVEL, 0)], "a task's weight 0 cannot be published"),
        ([(LEVEL, float("nan"))], "a task's weight nan cannot be published"),
        ([(LEVEL, "much")], "a task's weight 'much' cannot be published"),
        ([(LEVEL, 10**5000)], "a task's weight a int"),
        ({"level": 10**5000}, "is no finite number"),
        ({"level": {"spread": [10**5000, 1, "fleet", "linear"]}}, "give two numbers"),
        ([10**5000], "a task is a mapping"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_published_is_refused_by_a_sentence(
    broker: BrokerThread, teach: StartTeacher, task: Any, said: str
) -> None:
    teacher = teach(broker.endpoints.learner)
    with pytest.raises(EncodeError, match=said.replace("(", r"\(")) as refused:
        teacher.publish(task)
    assert "\n" not in str(refused.value)
    assert teacher.publish({"level": nested(8)}) == (1, 1), "nothing was sent, and no number is spent"


def test_a_message_of_tasks_that_cannot_be_sent_on_is_refused() -> None:
    """A number may be shorter in a peer's JSON than in ours. A broker that kept such tasks could not start."""
    with pytest.raises(DecodeError, match=r"300 tasks of 1,0.* bytes as JSON; at most 1,000,000"):
        read(Tasks, {"version": [1, 1], "tasks": [{"values": {"map": [1e15] * 190}}] * 300})


@pytest.mark.parametrize("group", [-1, 1 << 17, 1.5])
def test_a_group_is_a_number_of_episodes(broker: BrokerThread, teach: StartTeacher, group: Any) -> None:
    with pytest.raises(EncodeError, match="give an integer of 0 to 65,536"):
        teach(broker.endpoints.learner).publish(LEVEL, group=group)


@pytest.mark.parametrize(("count", "size"), [(4096, 207), (242, MOST_TASK_BYTES - len('{"level":""}'))])
def test_the_largest_publications_pass(
    broker: BrokerThread, teach: StartTeacher, start_feeder: StartFeeder, tmp_path: Path, count: int, size: int
) -> None:
    """Of the most tasks, and of the largest: 1 MB each, beside which the header of a message has little room."""
    feeder: Feeder = start_feeder(broker.endpoints.worker)
    tasks = [{"level": "x" * size}] * count
    assert teach(broker.endpoints.learner).publish(tasks) == (1, 1)
    wait_until(lambda: told(feeder.session) == ((1, 1), tasks), "1 MB of tasks")
    assert kept(tmp_path) == feeder.session.tasks

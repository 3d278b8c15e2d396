"""Figures by task: each episode and failure counts once, over restarts of the broker; the newest tasks have names."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.redis.parser import HashParser
from headrace.broker.reports.env_error_totals import EnvErrors
from headrace.broker.reports.task_figures import TaskFigures
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.learner_stub import EpisodeStream, TaskPublisher, spread
from headrace.schemas.accounts.env_errors import MOST_SLOTS, MOST_TOLD_TASKS, EnvErrorGroup
from headrace.schemas.basics.bounds import MOST_TASKS, OTHER_TASKS
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.task import Task, task_name
from headrace.workers.envs.failures import Failure
from headrace.workers.metrics.totals import FailureGroups
from support.pipeline.delivery import FLEET, BrokerThread
from support.pipeline.worker_threads import WorkerThread, closed_row, drain
from support.waiting import TIMEOUT_S, wait_until

COUNTS = ("episodes", "env_failures")


def counts(figures: TaskFigures) -> dict[str, tuple[float, ...]]:
    """(episodes, failures) by task."""
    return {task: tuple(row[name] for name in COUNTS) for task, row in figures.rows().items()}


def restarted(figures: TaskFigures) -> TaskFigures:
    """Return what the next broker goes on with, from Redis."""
    parser, later = HashParser(), TaskFigures(100)
    saved = parser.task_figures({task.encode(): orjson.dumps(row) for task, row in figures.rows().items()})
    assert not parser.garbage
    later.go_on_from(saved)
    return later


def test_the_tasks_seen_last_have_figures_of_their_own_and_the_others_are_summed_up() -> None:
    figures = TaskFigures(100)
    for number in range(MOST_TASKS + 3):
        figures.add_ended(f"task {number}", 2, 3.0, 10)
    figures.add_failures(["task 0"], 1)
    own = {f"task {number}": (2, 0) for number in range(4, MOST_TASKS + 3)}
    assert counts(figures) == {**own, "task 0": (0, 1), OTHER_TASKS: (8, 0)}
    others = figures.rows()[OTHER_TASKS]
    assert (others["return_mean"], others["len_mean"]) == (1.5, 5.0)
    assert "return_mean" not in figures.rows()["task 0"]
    later = restarted(figures)
    assert counts(later) == counts(figures)
    for number in range(100, 100 + MOST_TASKS):
        later.add_ended(f"task {number}", 1, 1.0, 1)
    assert counts(later).pop(OTHER_TASKS) == (8 + 2 * (MOST_TASKS - 1), 1)


def test_means_are_over_the_newest_episodes() -> None:
    figures = TaskFigures(100)
    figures.add_ended("a", 1, 1000.0, 1000)
    for _ in range(50):
        figures.add_ended("a", 2, 4.0, 6)
    row = figures.rows()["a"]
    assert (row["episodes"], row["return_mean"], row["len_mean"]) == (101, 2.0, 3.0)


def test_no_value_of_redis_or_of_a_peer_makes_a_row_that_cannot_be_read() -> None:
    figures = TaskFigures(100)
    figures.go_on_from({"a": {"episodes": 1e300, "env_failures": -7.0, "last_unix_s": 1e300}, "b": {}})
    for _ in range(2):
        figures.add_ended("b", 1, 1.7e308, 2**53 - 1)
    assert counts(restarted(figures)) == {"a": (2**53 - 1, 0), "b": (2, 0)}


def fail(groups: FailureGroups, *tasks: str) -> EnvErrorGroup:
    """Let an env fail once in each of these tasks. Return the group."""
    for task in tasks:
        failure = Failure(0, ValueError("x"), task=Task((1, 1), {}, published=task) if task else None)
        failure.note(groups, "Env-v0")
    return groups.all()[0]


def take(errors: EnvErrors, figures: TaskFigures, group: EnvErrorGroup, incarnation: int = 1) -> None:
    figures.add_failures(group.tasks, errors.take(0, incarnation, group, 1e10))


def test_a_failure_counts_once_for_its_task_over_repeats_lives_and_brokers() -> None:
    errors, figures, groups = EnvErrors(), TaskFigures(100), FailureGroups()
    take(errors, figures, fail(groups, "", ""))
    assert counts(figures) == {}
    for group in (fail(groups, "a", "b", "a"), fail(groups)):
        take(errors, figures, group)
    assert counts(figures) == {"a": (0, 2), "b": (0, 1)}
    parser, later, seen = HashParser(), EnvErrors(), restarted(figures)
    later.go_on_from(parser.env_errors({name.encode(): orjson.dumps(row) for name, row in errors.rows().items()}))
    take(later, seen, fail(groups, "b"))
    take(later, seen, fail(FailureGroups(), "c"), incarnation=2)
    assert counts(seen) == {"a": (0, 2), "b": (0, 2), "c": (0, 1)}
    [row] = later.rows().values()
    assert (row["count"], row["tasks"]) == (7, ["a", "b", "c"])


def test_a_broker_that_heard_failures_before_redis_answered_counts_them_once() -> None:
    groups, first, late = FailureGroups(), TaskFigures(100), TaskFigures(100)
    take(EnvErrors(), first, fail(groups, "a", "b"))
    take(EnvErrors(), late, groups.all()[0])
    late.add_ended("b", 5, 5.0, 5)
    late.go_on_from(first.rows())
    assert counts(late) == {"a": (0, 1), "b": (5, 1)}


def test_failures_beyond_those_that_a_worker_tells_are_of_other_tasks() -> None:
    errors, figures, groups = EnvErrors(), TaskFigures(100), FailureGroups()
    names = [f"task {number}" for number in range(12)]
    group = fail(groups, *names, *["a"] * (MOST_TOLD_TASKS - 1), "b")
    assert len(group.tasks) == MOST_TOLD_TASKS
    take(errors, figures, group)
    assert counts(figures) == {"a": (0, MOST_TOLD_TASKS - 1), "b": (0, 1), OTHER_TASKS: (0, 12)}
    take(errors, figures, fail(groups, *names))
    [row] = errors.rows().values()
    assert row["tasks"] == names[-MOST_SLOTS:]


def test_a_group_without_tasks_is_written_as_before() -> None:
    group = fail(FailureGroups(), "")
    assert "tasks" not in group.model_dump()
    errors = EnvErrors()
    errors.take(0, 1, group, 1e10)
    assert all("tasks" not in row for row in errors.rows().values())


@pytest.mark.processes
def test_figures_agree_with_the_chunks_of_a_learner_over_restarts_of_the_broker(
    make_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The learner commits nothing before the first restart, so the worker sends all batches again."""
    server = make_server().start()
    sampling = {"env": "support.envs.tasked:Optioned", "env_config": {"breaks": 9.0}, "env_restart_attempts": 50}
    sampling |= {"num_envs": 2, "rollout_fragment_length": 16}
    names: dict[tuple[int, int], str] = {}
    ended: Counter[str] = Counter()

    def see(batch: ChunkBatch) -> None:
        ended.update(names[chunk.task.version] for chunk in batch if chunk.is_done and chunk.task is not None)

    def snapshot() -> Snapshot:
        with FleetView(server.url, FLEET) as view:
            return view.read()

    def told(task: str, name: str) -> float:
        return snapshot().task_figures.get(task, {}).get(name, 0)

    with ExitStack() as stack:

        def start() -> BrokerThread:
            return stack.enter_context(BrokerThread(tmp_path, redis_url=server.url, report_interval_s=0.2))

        def publish(values: dict[str, Any]) -> str:
            with TaskPublisher(broker.endpoints.learner, connect_timeout_s=TIMEOUT_S) as teacher:
                version = teacher.publish(values)
            return names.setdefault(version, task_name(values))

        broker = start()
        stream = stack.enter_context(EpisodeStream(broker.endpoints.learner, auto_commit=False))
        worker = WorkerThread(
            monkeypatch,
            broker.endpoints.worker,
            tmp_path,
            {"sampling": sampling, "worker": {"random_actions_before_weights": True}},
        )
        spreading = publish({"level": spread(1.0, 2.0)})  # before a window of episodes without it is full
        with worker:
            wait_until(lambda: told(spreading, "episodes") > 10, "episodes that no learner has")
            broker.stop()
            broker = start()

            def take(wanted: bool = True) -> bool:
                if (batch := stream.next(0.1)) is not None:
                    see(batch)
                stream.commit()
                return wanted

            before = told(spreading, "episodes")
            wait_until(lambda: take() and told(spreading, "episodes") > before + 10, "further episodes")
            broken = publish({"level": 9.0})
            wait_until(lambda: take() and told(broken, "env_failures") > 2, "failures of envs")
            last = publish({"level": 4.0})
            wait_until(lambda: take() and ended[last] > 5, "episodes after the failures")
        closed_row(broker, take=lambda: (drain(stream, see), stream.commit()))
        wait_until(lambda: told(last, "episodes") == ended[last], "the last episodes")
        seen = snapshot()
        figures = seen.task_figures
        assert {task: row["episodes"] for task, row in figures.items()} == {
            spreading: ended[spreading],
            broken: 0,
            last: ended[last],
        }
        failures = {spreading: 0, broken: seen.totals["env_failures_total"], last: 0}
        wait_until(
            lambda: {task: row["env_failures"] for task, row in snapshot().task_figures.items()} == failures,
            "all failures",
        )
        assert 5.0 < figures[spreading]["return_mean"] == figures[spreading]["len_mean"] < 6.0
        [group] = snapshot().errors.values()
        assert (group.tasks, group.count) == ([broken], failures[broken])

        figures = snapshot().task_figures
        for empties in (False, True):  # the second time lifetime.json alone has them
            broker.stop()
            if empties:
                with server.client() as client:
                    client.flushall()
            broker = start()
            wait_until(lambda: snapshot().reported_unix_s is not None, "a report")
            wait_until(
                lambda: (
                    {task: row["episodes"] for task, row in snapshot().task_figures.items()}
                    == {task: row["episodes"] for task, row in figures.items()}
                ),
                "the figures of before",
            )
            assert {task: row["env_failures"] for task, row in snapshot().task_figures.items()} == failures

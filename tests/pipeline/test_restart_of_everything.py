"""A worker that starts after its fleet was killed begins with the current version of everything."""

from __future__ import annotations

import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import redis as redis_client
from numpy.typing import NDArray

from headrace.broker.files.state_file import read_broker_file
from headrace.deploy.run.redis_server import RedisLaunch, prepare_redis, wait_ready
from headrace.deploy.run.redis_view import FleetView, Snapshot
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.accounts.redis_keys import RUNNER_STATE, key_name
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.messages import Ack, WorkerHello, WorkerWelcome
from headrace.schemas.messages.weights import CONNECTORS
from headrace.schemas.settings.config_loading import build_config
from headrace.workers.config import runner_config
from headrace.workers.fleet.session import WorkerSession
from headrace.workers.fleet.window import SessionLimits
from headrace.workers.runner.single_agent_env_runner import SingleAgentEnvRunner
from support.pipeline.delivery import (
    FLEET,
    BrokerThread,
    Envs,
    Process,
    StartFeeder,
    broker_process,
    worker_process,
)
from support.waiting import TIMEOUT_S, wait_until

SECTIONS: dict[str, Any] = {
    "sampling": {
        "env": "CartPole-v1",
        "num_envs": 2,
        "rollout_fragment_length": 8,
        "env_to_module": ["headrace.workers.connectors:MeanStd"],
    },
    "module": {"build": "support.pipeline.timed_module:Timed"},
    "learner": {"steps_per_update": 32},
}
FAR_OFF = 100.0
"""A mean so far from what is seen that all of it is clipped to -10."""


class Redis:
    """A server that is killed and comes back with what it had."""

    def __init__(self, run_dir: Path) -> None:
        self.launch: RedisLaunch = prepare_redis(run_dir)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self.launch.argv, stdout=subprocess.DEVNULL)
        wait_ready(self.launch.url, 30.0)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def snapshot(self) -> Snapshot:
        with FleetView(self.launch.url, FLEET) as view:
            return view.read()

    def lifetime_steps(self) -> int:
        """Return the lifetime steps of the runner in slot 0, as Redis has them."""
        with redis_client.Redis.from_url(self.launch.url, protocol=2) as client:
            raw: Any = client.hget(key_name(FLEET, RUNNER_STATE), "0")
        return int(orjson.loads(raw)["num_env_steps_sampled_lifetime"]) if raw else 0


class Fleet:
    """One broker and one worker at a time, in processes of their own."""

    def __init__(self, stack: ExitStack, redis: Redis, run_dir: Path) -> None:
        self.stack, self.redis, self.run_dir = stack, redis, run_dir
        self.brokers = 0

    def start_broker(self) -> None:
        """In a run directory of its own: what it knows of the past it has from Redis."""
        self.brokers += 1
        self.home = self.run_dir / f"broker-{self.brokers}"
        self.home.mkdir()
        self.broker = self.stack.enter_context(broker_process(self.home, self.redis.launch.url))
        before = read_broker_file(self.home)
        assert before is not None
        self.endpoints = before.endpoints

    def start_worker(self, incarnation: int) -> Process:
        worker = worker_process(self.run_dir, self.endpoints.worker, 0, incarnation, SECTIONS)
        return self.stack.enter_context(worker)

    def restart(self, killed: str) -> None:
        """Kill, and start again, what is named."""
        if killed in ("broker", "everything"):
            self.broker.signal(signal.SIGKILL)
            self.broker.wait()
        if killed in ("redis", "everything"):
            self.redis.kill()
            self.redis.start()
        if killed in ("broker", "everything"):
            self.start_broker()


def weights() -> dict[str, NDArray[Any]]:
    """The policy's, and what its connector knows."""
    with SingleAgentEnvRunner(runner_config(build_config(SECTIONS))) as runner:
        known = runner.get_state(["env_to_module"])["env_to_module"]
    values = {"count": 1e9, "mean": FAR_OFF, "m2": 1e9}
    connectors = {
        f"{CONNECTORS}env_to_module/{name}": np.full_like(array, values[name.rpartition("/")[2]])
        for name, array in known.items()
    }
    return {"weight": np.array([7.0], np.float32), **connectors}


def check_current(batch: ChunkBatch | None) -> ChunkBatch:
    """It was sampled with the newest weights and connector state from its first step on."""
    assert batch is not None
    assert (batch.learner_epoch, set(batch.columns["weights_seq"].tolist())) == (1, {1})
    assert set(batch.columns["values"].tolist()) == {7.0}
    np.testing.assert_array_equal(batch.arrays["obs"], np.full_like(batch.arrays["obs"], -10.0))
    return batch


def first_of(stream: EpisodeStream, incarnation: int) -> ChunkBatch | None:
    """The first batch of a life; a broker that lived on still has some of the one before."""
    while (batch := stream.next(TIMEOUT_S)) is not None and batch.incarnation < incarnation:
        stream.commit()
    return batch


@pytest.mark.one_in(3)
@pytest.mark.chaos
@pytest.mark.parametrize("killed", ["everything", "broker", "redis"])
def test_a_restarted_worker_starts_with_current_weights_connectors_and_counters(
    killed: str, stack: ExitStack, tmp_path: Path
) -> None:
    redis = Redis(tmp_path / "redis")
    stack.callback(redis.kill)
    redis.start()
    fleet = Fleet(stack, redis, tmp_path)
    fleet.start_broker()
    with WeightPublisher(fleet.endpoints.learner) as publisher, EpisodeStream(fleet.endpoints.learner) as stream:
        first = fleet.start_worker(1)
        stream.spaces()
        publisher.publish(weights())
        check_current(stream.next(TIMEOUT_S))
        wait_until(lambda: stream.next(0.1) and redis.lifetime_steps() > 100, "lifetime counters in Redis")
        first.signal(signal.SIGKILL)
        first.wait()
        stream.commit()
    # The killed worker may have told of steps that it had no credit to ship: only its runner counts those.
    reported = redis.snapshot().totals["accepted_agent_steps_total"]
    fleet.restart(killed)
    redis_knows(redis)
    steps_before, known = redis.lifetime_steps(), redis.snapshot().totals["accepted_agent_steps_total"]
    with EpisodeStream(fleet.endpoints.learner) as stream:
        second = fleet.start_worker(2)
        batch = check_current(first_of(stream, 2))
        assert int(batch.columns["t"].min()) == known >= reported > 0
        second.signal(signal.SIGTERM)
        wait_until(lambda: stream.next(0.1) is None and second.popen.poll() is not None, "the worker's end")
        assert second.popen.returncode == 0, second.log.read_text()
        wait_until(lambda: (0, 2) in redis.snapshot().rows and redis.snapshot().rows[0, 2].closed, "its books in Redis")
    own = redis.snapshot().rows[0, 2].totals.shipped
    assert redis.lifetime_steps() == steps_before + own > steps_before


def redis_knows(redis: Redis) -> None:
    """Wait until the broker that runs has told Redis all it knows: two of its reports have come."""
    first = redis.snapshot().reported_unix_s
    wait_until(lambda: redis.snapshot().reported_unix_s != first, "a report")
    second = redis.snapshot().reported_unix_s
    wait_until(lambda: redis.snapshot().reported_unix_s != second, "another report")


def test_each_worker_gets_the_step_count_of_the_other_workers(broker: BrokerThread, start_feeder: StartFeeder) -> None:
    plan = Envs().fragments(10)
    busy = start_feeder(broker.endpoints.worker, plan, slot=0)
    idle = start_feeder(broker.endpoints.worker, slot=1)
    made = sum(batch.steps for batch in plan)
    wait_until(lambda: idle.session.steps_elsewhere == made, "the other's steps")
    assert busy.session.steps_elsewhere == 0


def test_the_step_count_of_other_workers_never_decreases_after_a_broker_restart() -> None:
    """A new broker knows no steps. It learns only of steps in batches that workers still hold."""
    session = WorkerSession(WorkerHello(fleet_id=FLEET, token="t", slot=1, incarnation=1), SessionLimits())
    welcome = WorkerWelcome(fleet_id=FLEET, slot=1, incarnation=1, max_batch_bytes=1)
    ack = Ack(slot=1, incarnation=1)

    def hears(message: WorkerWelcome | Ack, steps: int) -> int:
        session.receive(message.model_copy(update={"steps_elsewhere": steps}), 0.0)
        return session.steps_elsewhere

    assert (hears(welcome, 100), hears(ack, 120)) == (100, 120)
    assert (hears(welcome, 0), hears(ack, 30), hears(ack, 150)) == (120, 120, 150)

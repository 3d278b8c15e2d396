"""A worker that is killed while a client acts by itself: the client goes on, and each of its steps is in the books."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from pathlib import Path

import gymnasium as gym
import pytest

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.schemas.errors.episodes import EpisodeAbortedError
from headrace.workers import EnvRunnerConfig
from headrace.workers.serving.acting import ActingClient
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.chaos

FLEET = ("--env", "CartPole-v1", "--workers", "1", "--num-envs", "4", "--serve", "--until-steps", "10000000")
SETTINGS = ("--set", "serving.client_inference=true", "--set", "learner.steps_per_update=256")


class Players:
    """Three games at once, for as long as the block lasts. Those that are aborted begin anew."""

    def __init__(self, client: ActingClient) -> None:
        self._client = client
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._play, args=(seed,)) for seed in range(3)]
        self.failure: BaseException | None = None

    def _play(self, seed: int) -> None:
        env = gym.make("CartPole-v1")
        try:
            while not self._over.is_set():
                with suppress(EpisodeAbortedError):
                    self._play_one(env, seed)
        except BaseException as error:
            self.failure = error
        env.close()

    def _play_one(self, env: gym.Env, seed: int) -> None:
        observation, _ = env.reset(seed=seed)
        episode, terminated = self._client.start_episode(), False
        while not (terminated or self._over.wait(0.002)):
            observation, reward, terminated, _, _ = env.step(int(self._client.get_action(episode, observation)))
            self._client.log_returns(episode, float(reward))
        self._client.end_episode(episode, observation, truncated=not terminated)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        assert self.failure is None, repr(self.failure)


def endpoint(run_dir: Path) -> str:
    path = run_dir / "fleet.json"
    return read_fleet_file(path).endpoints.get("clients-0", "") if path.exists() else ""


def test_client_steps_lost_with_a_killed_worker_are_reported_as_unshipped(tmp_path: Path) -> None:
    with RunningFleet(tmp_path, *FLEET, *SETTINGS) as fleet:
        fleet.wait_until(lambda: endpoint(tmp_path), "the worker serves")
        config = EnvRunnerConfig(num_envs=4, seed=1, external_fragment_max_age_s=0.5)
        with ActingClient(endpoint(tmp_path), config, timeout_s=TIMEOUT_S) as client:
            shipments, totals = client._acting._shipments, client._acting._runner.totals
            with Players(client):
                fleet.wait_until(lambda: fleet.steps() > 300, "steps of the client")
                taken = shipments._number
                fleet.wait_until(lambda: shipments._number > taken, "a shipment is taken, so that none is under way")
                fleet.send(signal.SIGSTOP, "worker")
                cut = totals.delivered
                fleet.wait_until(lambda: totals.delivered > cut, "another is cut, which nobody takes")
                killed = fleet.send(signal.SIGKILL, "worker")
                fleet.wait_until(lambda: fleet.pid("worker") not in (None, killed), "another worker")
                fleet.wait_until(lambda: shipments.lost_steps, "the client finds out")
                before = fleet.steps()
                fleet.wait_until(lambda: fleet.steps() > before + 300, "progress")
        assert client.failure is None
        fleet.terminate()
        result = fleet.finish()
        audit = fleet.audit()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert result["restarts"] == {"worker": 1, "broker": 0, "learner": 0, "redis": 0}
    ledger = result["ledger"]
    assert ledger["discarded"]["unshipped"] == shipments.lost_steps > 0
    assert ledger["stepped"] == totals.stepped
    assert ledger["committed"][0] > 600

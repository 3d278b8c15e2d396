"""RLlib's EnvRunners beside a fleet's workers, on the same Ray: two of each, with 8 CartPoles and the same layers.

PYTHONPATH=tests python tests/bench/peers/rllib_env_runners.py SECONDS ROUNDS

Needs ray[rllib] and Headrace in one environment, which `python tests/bench/compare.py rllib-on-ray` makes. Both take
turns. Prints a JSON list of rounds: {"rllib", "headrace"}, each with {"rate", "per_cpu_s"} in env steps. Both sample
with fixed weights, and nothing is trained.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import ray
from measuring import with_children
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from bench.turns import in_turns
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.workers.modules import actor_critic

RUNNERS, NUM_ENVS, LENGTH, QUEUE = 2, 8, 250, 2
"""A worker has so many batches on the way, so that it soon rests when the other arm has its turn."""
HIDDEN = [256, 256]
SPACES = Spaces(observation=Box(shape=(4,), dtype="<f4"), action=Discrete(n=2))
FLEET_ID = f"beside-rllib-{os.getpid()}"


class EnvRunners:
    """RLlib's runners. Each is asked for its next sample as soon as one is there."""

    def __init__(self) -> None:
        model = DefaultModelConfig(fcnet_hiddens=HIDDEN, fcnet_activation="tanh", vf_share_layers=False)
        settings = (
            PPOConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=RUNNERS, num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=LENGTH)
            .training(train_batch_size_per_learner=RUNNERS * NUM_ENVS * LENGTH)
            .rl_module(model_config=model)
        )
        self.algorithm = settings.build_algo()
        self._group = self.algorithm.env_runner_group
        found = self._group.foreach_env_runner(lambda runner: os.getpid(), local_env_runner=False)
        self.pids = {f"runner-{number}": pid for number, pid in enumerate(found)}

    def begin(self) -> None: ...

    def take(self) -> int:
        while not (found := self._group.foreach_env_runner_async_fetch_ready(_steps, tag="sample")):
            time.sleep(0.001)
        return sum(found)

    def end(self) -> None: ...


def _steps(runner: object) -> int:
    return sum(len(episode) for episode in runner.sample())


class Workers:
    """A fleet's workers, whose steps a learner gets."""

    def __init__(self, stream: EpisodeStream, run_dir: Path) -> None:
        self._batches, seen = iter(stream), set()
        while len(seen) < RUNNERS:
            seen.add(next(self._batches).slot)
        self.pids = {str(pid): pid for found in _pids_of(str(run_dir), FLEET_ID) for pid in with_children(found)}

    def begin(self) -> None:
        """Take what the workers have made meanwhile, and what they have begun."""
        for _ in range(RUNNERS * (QUEUE + 1)):
            self.take()

    def take(self) -> int:
        return next(self._batches).steps

    def end(self) -> None: ...


def _pids_of(*words: str) -> list[int]:
    """Return the processes with one of these words in their command lines."""
    lines = {path: path.read_bytes().decode(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [int(path.parent.name) for path, line in lines.items() if any(word in line for word in words)]


@contextmanager
def workers_on(address: str) -> Iterator[Workers]:
    """Run a fleet with its workers on this Ray."""
    module = {"hidden": HIDDEN, "vf_share_layers": False}
    sets = {
        "ray.address": address,
        "ray.workers": RUNNERS,
        "fleet.fleet_id": FLEET_ID,
        "learner.enabled": False,
        "sampling.rollout_fragment_length": LENGTH,
        "worker.window_batches": QUEUE,
        "module.config": module,
    }
    chosen = [word for key, value in sets.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        command = [sys.executable, "-m", "headrace", "up", "--env", "CartPole-v1", "--workers", "0", "-q"]
        command += ["--no-dashboard", "--num-envs", str(NUM_ENVS), "--run-dir", folder, *chosen]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as fleet:
            try:
                endpoint = _learner_endpoint(run_dir / "fleet.json")
                with (
                    EpisodeStream(endpoint, run_dir=run_dir) as stream,
                    WeightPublisher(endpoint, run_dir=run_dir) as weights,
                ):
                    weights.publish(actor_critic(SPACES, **module).state_dict())
                    yield Workers(stream, run_dir)
            finally:
                fleet.terminate()


def _learner_endpoint(fleet: Path) -> str:
    while not (fleet.exists() and json.loads(fleet.read_bytes())["state"] == "running"):
        time.sleep(0.1)
    return str(json.loads(fleet.read_bytes())["endpoints"]["learner"])


def main() -> None:
    """Measure both in turns and print the rounds."""
    seconds, rounds = float(sys.argv[1]), int(sys.argv[2])
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    context = ray.init(num_cpus=2 * RUNNERS + 1, include_dashboard=False, log_to_driver=False)
    runners = EnvRunners()
    with workers_on(context.address_info["address"]) as workers:
        turns = in_turns({"rllib": runners, "headrace": workers}, seconds, rounds)
    runners.algorithm.stop()
    ray.shutdown()
    print(json.dumps([{arm: asdict(turn) for arm, turn in one.items()} for one in turns]))


main()

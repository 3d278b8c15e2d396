"""RLlib's EnvRunners beside a fleet's workers, on the same Ray: two of each, with 8 CartPoles and the same layers.

python tests/bench/peers/rllib_env_runners.py SECONDS. Needs ray[rllib]. Prints {"rllib", "headrace", "ratio"} as JSON,
in env steps per second. Both sample with fixed weights, and nothing is trained.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.workers.modules import actor_critic

RUNNERS, NUM_ENVS, LENGTH, WARM_UP_S = 2, 8, 250, 5.0
HIDDEN = [256, 256]
SPACES = Spaces(observation=Box(shape=(4,), dtype="<f4"), action=Discrete(n=2))


def of_rllib(seconds: float) -> float:
    """Return the rate of RLlib's runners. Each is asked for its next sample as soon as one is there."""
    model = DefaultModelConfig(fcnet_hiddens=HIDDEN, fcnet_activation="tanh", vf_share_layers=False)
    settings = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=RUNNERS, num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=LENGTH)
        .training(train_batch_size_per_learner=RUNNERS * NUM_ENVS * LENGTH)
        .rl_module(model_config=model)
    )
    algorithm = settings.build_algo()
    group = algorithm.env_runner_group
    steps, ready, now = 0, time.monotonic() + WARM_UP_S, time.monotonic()
    began = None
    while began is None or now < began + seconds:
        results = group.foreach_env_runner_async_fetch_ready(
            lambda runner: sum(len(episode) for episode in runner.sample()), tag="sample"
        )
        now = time.monotonic()
        if began is not None:
            steps += sum(results)
        elif now > ready and results:
            began = now
        time.sleep(0.001)
    algorithm.stop()
    return steps / (now - began)


def of_headrace(seconds: float, address: str) -> float:
    """Return the rate of a fleet with its workers on the same Ray, as a learner gets their steps."""
    module = {"hidden": HIDDEN, "vf_share_layers": False}
    sets = {
        "ray.address": address,
        "ray.workers": RUNNERS,
        "learner.enabled": False,
        "sampling.rollout_fragment_length": LENGTH,
        "module.config": module,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "headrace",
            "up",
            "--env",
            "CartPole-v1",
            "--workers",
            "0",
            "-q",
            "--no-dashboard",
        ]
        command += ["--num-envs", str(NUM_ENVS), "--run-dir", folder]
        for key, value in sets.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as fleet:
            try:
                return consume(Path(folder), seconds, actor_critic(SPACES, **module))
            finally:
                fleet.terminate()


def consume(run_dir: Path, seconds: float, module: object) -> float:
    """Return the rate at which steps of both workers come."""
    fleet = run_dir / "fleet.json"
    while not (fleet.exists() and json.loads(fleet.read_bytes())["state"] == "running"):
        time.sleep(0.1)
    endpoint = json.loads(fleet.read_bytes())["endpoints"]["learner"]
    with (
        EpisodeStream(endpoint, run_dir=run_dir) as stream,
        WeightPublisher(endpoint, run_dir=run_dir) as weights,
    ):
        weights.publish(module.state_dict())
        seen, steps, began = set(), 0, 0.0
        for batch in stream:
            seen.add(batch.slot)
            if began:
                steps += batch.steps
                if time.monotonic() > began + seconds:
                    return steps / (time.monotonic() - began)
            elif len(seen) == RUNNERS:
                began = time.monotonic()
    raise RuntimeError("the stream has ended")


def main() -> None:
    """Measure one after the other and print the result."""
    seconds = float(sys.argv[1])
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
    context = ray.init(num_cpus=2 * RUNNERS, include_dashboard=False, log_to_driver=False)
    address = context.address_info["address"]
    rllib, headrace = of_rllib(seconds), of_headrace(seconds, address)
    print(json.dumps({"rllib": round(rllib), "headrace": round(headrace), "ratio": round(headrace / rllib, 2)}))
    ray.shutdown()


main()

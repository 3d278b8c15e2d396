"""Sample Factory's own training loop, with one pass over each batch: it has no sampler that runs alone.

python tests/bench/peers/sample_factory_rates.py (sampling | workers) NUM_ENVS SECONDS

- sampling: all in this process.
- workers: two rollout workers.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import gymnasium as gym
import torch
from measuring import WARM, processor_s
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from small_policy import ENV

STEPS = 64
"""Steps of each env in one batch."""


class Clock(AlgoObserver):
    """Marks the time, the processor time and the env steps after the warm-up and at the end, and ends the training."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due = 0.0
        self.marks: list[tuple[float, float, int]] = []

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        """Mark what is due."""
        now = time.perf_counter()
        self._due = self._due or now + WARM * self._seconds
        if now >= self._due and len(self.marks) < 2:
            self.marks.append((now, processor_s(), sum(runner.env_steps.values())))
            self._due = now + self._seconds
        if len(self.marks) == 2:
            runner.cfg.train_for_env_steps = 0


def settings(measure: str, width: int, folder: str) -> list[str]:
    """Return its command line."""
    batch = STEPS * width
    serial = measure == "sampling"
    told = {
        "env": ENV,
        "device": "cpu",
        "train_dir": folder,
        "num_workers": 1 if serial else 2,
        "num_envs_per_worker": width,
        "worker_num_splits": 1,
        "rollout": STEPS,
        "batch_size": batch,
        "num_epochs": 1,
        "serial_mode": serial,
        "async_rl": not serial,
        "use_rnn": False,
        "encoder_mlp_layers": ["64", "64"],
        "nonlinearity": "tanh",
        "normalize_input": False,
        "normalize_returns": False,
        "experiment_summaries_interval": 1000,
        "save_every_sec": 100000,
    }
    return [f"--{name}={value}" for name, value in told.items() if name != "encoder_mlp_layers"] + [
        "--encoder_mlp_layers",
        *told["encoder_mlp_layers"],
    ]


def make_env(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> gym.Env[Any, Any]:
    """Return one env."""
    return gym.make(name)


def main() -> None:
    """Train for a while and print the rates."""
    measure, width, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    register_env(ENV, make_env)
    clock = Clock(seconds)
    with tempfile.TemporaryDirectory() as folder:
        arguments = settings(measure, width, folder)
        parser, _ = parse_sf_args(arguments)
        _, runner = make_runner(parse_full_cfg(parser, arguments))
        runner.register_observer(clock)
        runner.init()
        runner.run()
    (began, spent_before, steps_before), (ended, spent, steps) = clock.marks
    count = steps - steps_before
    print(json.dumps({"rate": count / (ended - began), "per_cpu_s": count / (spent - spent_before)}))


if __name__ == "__main__":
    main()

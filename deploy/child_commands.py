"""Commands that start each role: argv and environment of the supervisor's children."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headrace.deploy.output import chosen_output
from headrace.deploy.supervisor import ProcessSpec, Role
from headrace.schemas.config import FleetConfig
from headrace.schemas.config_loading import ENV_PREFIX

_BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def check_start(config_json: Path) -> list[str]:
    """Return the command of the check before a start."""
    return _headrace("check-start", config_json)


def broker(config_json: Path, run_dir: Path, fleet_id: str, max_env_steps: int | None = None) -> ProcessSpec:
    """Return how to start the broker. Its Redis URL is in the config file, since every user can read argv."""
    argv = _headrace("broker", config_json, "--run-dir", str(run_dir), "--fleet-id", fleet_id)
    argv += [] if max_env_steps is None else ["--max-env-steps", str(max_env_steps)]
    return ProcessSpec("broker", Role.BROKER, lambda _: argv, env=child_environment(1))


def worker(
    config: FleetConfig, config_json: Path, run_dir: Path, endpoint: str, fleet_id: str, slot: int
) -> ProcessSpec:
    """Return how to start the worker of one slot."""
    argv = _headrace("worker", config_json, "--run-dir", str(run_dir), "--endpoint", endpoint, "--fleet-id", fleet_id)
    return ProcessSpec(
        f"worker-{slot}",
        Role.WORKER,
        lambda incarnation: [*argv, "--slot", str(slot), "--incarnation", str(incarnation)],
        slot=slot,
        env=child_environment(config.sampling.torch_threads),
        has_port=config.sampling.env_placement == "remote",
    )


def env_host(config_json: Path, address: str, num_envs: int, fleet_id: str, number: int) -> ProcessSpec:
    """Return how to start an env host for the worker at `address`."""
    argv = _headrace("env-host", config_json, "--connect", address, "--num-envs", str(num_envs))
    argv += ["--set", f"fleet.fleet_id={fleet_id}"]
    return ProcessSpec(f"env-host-{number}", Role.ENV_HOST, lambda _: argv, env=child_environment(1))


def learner(config: FleetConfig, config_json: Path, run_dir: Path, endpoint: str, fleet_id: str) -> ProcessSpec:
    """Return how to start the reference learner."""
    argv = _headrace("learner", config_json, "--run-dir", str(run_dir), "--endpoint", endpoint, "--fleet-id", fleet_id)
    return ProcessSpec("learner", Role.LEARNER, lambda _: argv, env=child_environment(config.learner.torch_threads))


def evaluator(config: FleetConfig, config_json: Path, run_dir: Path) -> ProcessSpec:
    """Return how to start the process that evaluates checkpoints. Training goes on without it."""
    argv = _headrace("evaluate", config_json, str(run_dir), "--watch")
    environment = child_environment(config.sampling.torch_threads)
    return ProcessSpec("evaluator", Role.EVALUATOR, lambda _: argv, env=environment, optional=True)


def child_environment(threads: int) -> dict[str, str]:
    """Return our environment with BLAS pinned to `threads`, and without `HEADRACE_SECTION__KEY`.

    The resolved config has those variables already. If children read them again, they would override the flags of `up`.
    """
    kept = {k: v for k, v in os.environ.items() if not (k.startswith(ENV_PREFIX) and "__" in k)}
    return {**dict.fromkeys(_BLAS_THREADS, str(threads)), **kept}


def _headrace(command: str, config_json: Path, *arguments: str) -> list[str]:
    output = ["--log-format", "json", *(["--verbose"] if chosen_output().verbose else [])]
    return [sys.executable, "-m", "headrace.deploy", command, "--config", str(config_json), *arguments, *output]

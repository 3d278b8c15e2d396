"""Commands that start each role: argv and environment of the supervisor's children."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.deploy.process.child_environment import child_environment
from headrace.deploy.process.fork_server import HEADRACE
from headrace.deploy.process.supervisor import ProcessSpec, Role
from headrace.deploy.terminal.logs import chosen_output
from headrace.schemas.settings.config import FleetConfig


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
    """Return how to start the worker of one slot. The supervisor stops it, so it need not leave with the fleet."""
    argv = _headrace("worker", config_json, "--run-dir", str(run_dir), "--endpoint", endpoint, "--fleet-id", fleet_id)
    argv += ["--set", "worker.ends_with_fleet=false"]
    return ProcessSpec(
        f"worker-{slot}",
        Role.WORKER,
        lambda incarnation: [*argv, "--slot", str(slot), "--incarnation", str(incarnation)],
        slot=slot,
        env=child_environment(config.sampling.torch_threads),
        has_port=config.sampling.env_placement == "remote",
    )


def group_worker(config_json: Path, folder: Path, options: Sequence[str]) -> list[str]:
    """Return the command of a worker of a group, which keeps its files in `folder`. `options` name the fleet."""
    return _headrace("worker", config_json, "--run-dir", str(folder), *options)


def worker_of_group(
    config: FleetConfig, name: str, command: Sequence[str], slot: Callable[[], int | None]
) -> ProcessSpec:
    """Return how to start a worker whose slot the broker gives. `slot` returns the slot of its earlier life, if any."""

    def argv(_: int) -> list[str]:
        known = slot()
        return [*command, *([] if known is None else ["--slot", str(known)])]

    environment, has_port = child_environment(config.sampling.torch_threads), config.sampling.env_placement == "remote"
    return ProcessSpec(name, Role.WORKER, argv, env=environment, has_port=has_port)


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


def recorder(run_dir: Path, folder: Path) -> ProcessSpec:
    """Return how to start the process that records the fleet's batches in `folder`."""
    argv = _headrace("record", None, str(run_dir), "--dir", str(folder))
    return ProcessSpec("recorder", Role.RECORDER, lambda _: argv, env=child_environment(1))


def ray_workers(config_json: Path, run_dir: Path, endpoint: str, fleet_id: str) -> ProcessSpec:
    """Return how to start the process that keeps workers on a Ray cluster, as many as ray.json in `run_dir` says."""
    argv = _headrace("ray", config_json, "--run-dir", str(run_dir), "--endpoint", endpoint, "--fleet-id", fleet_id)
    return ProcessSpec("ray", Role.RAY, lambda _: [*argv[:4], "workers", *argv[4:]], env=child_environment(1))


def dashboard(run_dir: Path, port: int) -> ProcessSpec:
    """Return how to start the live page of the run. The fleet goes on without it."""
    argv = _headrace("dashboard", None, "--run-dir", str(run_dir), "--listen", f"127.0.0.1:{port}")
    return ProcessSpec("dashboard", Role.DASHBOARD, lambda _: argv, env=child_environment(1), optional=True)


def _headrace(command: str, config_json: Path | None, *arguments: str) -> list[str]:
    output = ["--log-format", "json", *(["--verbose"] if chosen_output().verbose else [])]
    config = ["--config", str(config_json)] if config_json is not None else []
    return [*HEADRACE, command, *config, *arguments, *output]

"""Command lines of sbatch for the jobs of a fleet, and the settings that those jobs read."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

from headrace.deploy.run.run_dir import KEYS_FOLDER, file_name_of
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config import FleetConfig, is_loopback
from headrace.schemas.settings.config_loading import build_config

SCRIPTS = Path(__file__).resolve().parents[2] / "slurm"
EVERY_ADDRESS = "0.0.0.0"
PATIENCE_S = 600.0
"""Seconds for which workers wait for a broker, unless the user says otherwise. A head whose node failed is requeued,
and waits two minutes; and programs on a shared disk start slowly."""


class FleetPart(StrEnum):
    """A part of the fleet that has a script of its own. The value ends the job's name."""

    HEAD = "head"
    WORKERS = "workers"
    ENV_HOSTS = "env-hosts"

    @property
    def script(self) -> Path:
        """Return the path of its script."""
        return SCRIPTS / f"{self.value.replace('-', '_')}.sbatch"


def job_prefix(run_dir: Path) -> str:
    """Return the beginning of the names of the fleet's jobs."""
    return file_name_of(run_dir.name)


def sbatch_line(
    part: FleetPart, config: FleetConfig, run_dir: Path, *, tasks: int | None = None, after: str = ""
) -> list[str]:
    """Return the command line that submits a part.

    `tasks`: the number of tasks of an array; None for a job without an array. `after`: the job that must have started.
    """
    slurm, beside = config.slurm, Path(sys.executable).with_name("headrace")  # jobs run this installation too
    name = "%x-%j" if tasks is None else "%x-%A_%a"
    return [
        *("sbatch", "--parsable", "--export=ALL", f"--job-name={job_prefix(run_dir)}-{part}"),
        f"--output={run_dir}/slurm/{name}.log",
        *([f"--cpus-per-task={slurm.workers_per_task}"] if part is FleetPart.WORKERS else []),
        *([f"--array=0-{tasks - 1}"] if tasks is not None else []),
        *([f"--dependency=after:{after}"] if after else []),
        *slurm.options,
        *(slurm.head_options if part is FleetPart.HEAD else []),
        str(part.script),
        str(run_dir),
        str(beside) if beside.exists() else "headrace",
        *([str(slurm.workers_per_task)] if part is FleetPart.WORKERS else []),
    ]


def for_cluster(config: FleetConfig, run_dir: Path) -> FleetConfig:
    """Return the configuration as the fleet's jobs read it.

    The broker serves all nodes, with keys: those of the run where the user names none. The head job starts no workers,
    except where env hosts are asked for. Workers end with the fleet, so that they hold no nodes afterwards.

    Raises `ConfigError` for settings that cannot work on a cluster.
    """
    broker, keys, placement = config.broker, config.keys, config.sampling.env_placement
    if config.slurm.env_host_tasks and placement != "remote":
        at = f"{placement!r}; set it to 'remote', or leave out slurm.env_host_tasks"
        raise ConfigError(f"env hosts are for 'remote', and it is {at}", key="sampling.env_placement")
    changed: dict[str, Any] = {
        "fleet.run_dir": str(run_dir),
        "fleet.rendezvous": "",
        "fleet.workers": config.fleet.workers if config.slurm.env_host_tasks else 0,
        "fleet.env_hosts": 0,
        "worker.ends_with_fleet": True,
    }
    if not keys.dir and not broker.allow_insecure:
        changed["keys.dir"] = str(run_dir / KEYS_FOLDER)
    if is_loopback(broker.host):
        changed["broker.host"] = EVERY_ADDRESS
    if "connect_timeout_s" not in config.worker.model_fields_set:
        changed["worker.connect_timeout_s"] = PATIENCE_S
    return build_config(config.replaced(changed).model_dump())

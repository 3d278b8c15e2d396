"""Settings of `headrace slurm`: how many jobs, and what sbatch is told of them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from headrace.schemas.settings.config_section import ConfigSection

_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=[^\n\r\0]*)?")
_OURS = frozenset(
    ("array", "dependency", "error", "export", "job-name", "open-mode", "output", "parsable", "signal", "wrap")
)
_MOST_TASKS = 10_000


def _checked(option: str) -> str:
    """Return an option of sbatch as it is. Raises ValueError for one that `headrace slurm` sets itself."""
    matched = _OPTION.fullmatch(option)
    if matched is None:
        raise ValueError(f'{option!r:.80} is no option of sbatch, as "--partition=cpu"; give each one by itself')
    if matched[1] in _OURS:
        raise ValueError(f"--{matched[1]} is set by `headrace slurm` itself; leave it out")
    return option


Options = list[Annotated[str, AfterValidator(_checked)]]


class SlurmSection(ConfigSection):
    """Settings of the jobs that `headrace slurm up` submits."""

    worker_tasks: int = Field(default=2, ge=0, le=_MOST_TASKS)
    """array tasks of workers; `headrace slurm scale` changes it"""
    workers_per_task: int = Field(default=1, ge=1, le=1000)
    """workers that one such task runs"""
    env_host_tasks: int = Field(default=0, ge=0, le=_MOST_TASKS)
    """array tasks of one env host each, for workers of the head job (fleet.workers) and of worker_tasks"""
    options: Options = Field(default=[])
    """options of sbatch, as "--partition=cpu", for every job"""
    head_options: Options = Field(default=[])
    """further options for the job of broker, Redis and learner, as "--partition=gpu"; they win over options"""

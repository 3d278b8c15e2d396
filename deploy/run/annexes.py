"""Registrations of annexes with the main house. Each line of a table names a part of an annex by module.

A fleet samples, delivers and accounts without its annexes, and the main house imports none of them. It finds a part
here by name, when it needs the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

COMMANDS: Mapping[str, str] = {
    "headrace.deploy.annexes.policies.commands": "",
    "headrace.deploy.annexes.watch.commands": "",
    "headrace.deploy.annexes.chaos.commands": "",
    "headrace.deploy.annexes.doctor.commands": "",
    "headrace.deploy.annexes.serving.commands": "",
    "headrace.deploy.annexes.recording.commands": "",
    "headrace.deploy.annexes.recording.groups_command": "groups",
    "headrace.deploy.annexes.rerun.commands": "",
    "headrace.deploy.annexes.ray.commands": "ray",
    "headrace.deploy.annexes.slurm.commands": "slurm",
}
"""Modules with commands in an `app`, and the word before these commands: "" where they follow `headrace` itself."""

_PARTS: Mapping[str, str] = {
    "EpisodeVideo": "headrace.deploy.annexes.policies.episode_video",
    "audit_deeply": "headrace.deploy.annexes.chaos.deep_audit",
    "check_cluster": "headrace.deploy.annexes.ray.cluster",
    "check_pyarrow": "headrace.deploy.annexes.recording",
    "check_start": "headrace.deploy.annexes.doctor.start_check",
    "export_recording": "headrace.deploy.annexes.recording.exporting",
    "repeat": "headrace.deploy.annexes.rerun.replay",
    "rerun_of": "headrace.workers.reruns.failure_files",
    "run_env_host": "headrace.workers.envs.remote.host.process",
    "run_learner": "headrace.learner_stub.reference.training",
    "warn_of_limits": "headrace.deploy.annexes.doctor.limits",
    "write_wanted": "headrace.deploy.annexes.ray.wanted_workers",
}
"""Functions and classes that the main house and other annexes call, and their modules."""


def part(name: str) -> Any:
    """Import and return the function or class of an annex. Its docstring says what it takes."""
    return resolve_name(f"{_PARTS[name]}:{name}")

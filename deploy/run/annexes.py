"""What annexes register with the main house. Each line of a table names a part of an annex by module.

A fleet samples, delivers and accounts without its annexes, and the main house imports none of them. It finds a part
here by name, when it needs the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

COMMANDS: Mapping[str, str] = {
    "headrace.deploy.command.policy_commands": "",
    "headrace.deploy.command.watch_commands": "",
    "headrace.deploy.chaos.commands": "",
    "headrace.deploy.doctor.commands": "",
    "headrace.deploy.command.serve_command": "",
    "headrace.deploy.command.ray_command": "ray",
    "headrace.deploy.command.slurm_command": "slurm",
}
"""Modules with commands in an `app`, and the word before these commands: "" where they follow `headrace` itself."""

_PARTS: Mapping[str, str] = {
    "audit_deeply": "headrace.deploy.report.deep_audit",
    "check_cluster": "headrace.deploy.ray.cluster",
    "check_start": "headrace.deploy.policies.start_check",
    "run_env_host": "headrace.workers.envs.remote.host.process",
    "run_learner": "headrace.learner_stub.reference.training",
    "warn_of_limits": "headrace.deploy.doctor.limits",
    "write_wanted": "headrace.deploy.ray.wanted_workers",
}
"""Functions that the main house calls, and their modules."""


def part(name: str) -> Any:
    """Import and return the function of an annex. Its docstring says what it takes."""
    return resolve_name(f"{_PARTS[name]}:{name}")

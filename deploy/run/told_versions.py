"""The versions of Headrace that the processes of a fleet run, as its broker reports them to Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.deploy.run.redis_view import Snapshot
from headrace.schemas.basics.headrace_version import MOST_VERSION
from headrace.schemas.basics.printable import one_line


def told_versions(seen: Snapshot) -> dict[str, str]:
    """Return the version of the broker, the learner and each worker by name; "" if a peer does not report it.

    The env hosts of a worker have one entry, with all of their versions. Only connected peers are listed. The texts are
    safe to print on a terminal.
    """
    told: dict[str, Any] = {}
    if seen.version:
        told["broker"] = seen.version
    if seen.lease.get("connected"):
        told["learner"] = seen.lease.get("headrace_version", "")
    for slot, state in sorted(seen.workers.items()):
        told[f"worker-{slot}"] = state.get("headrace_version", "")
        if versions := _of_env_hosts(state):
            told[f"env hosts of worker-{slot}"] = ", ".join(versions) if all(versions) else ""
    return {name: one_line(str(version))[:MOST_VERSION] for name, version in told.items()}


def _of_env_hosts(state: Mapping[str, Any]) -> list[str]:
    hosts = state.get("env_hosts")
    versions = hosts.get("versions") if isinstance(hosts, Mapping) else None
    return [str(version) for version in versions] if isinstance(versions, list) else []

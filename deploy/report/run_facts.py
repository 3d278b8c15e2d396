"""`RUN/summary.json`: facts about a run and its end, for a report of the run when its Redis is gone.

`up` writes the file at its start, with the machine and the versions, and again at its end, with the final books. A run
whose supervisor was killed has only the first part.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from headrace.deploy.process.supervisor import Role, Service, ServiceState
from headrace.deploy.report.summary import Summary
from headrace.deploy.run.run_dir import write_private
from headrace.schemas.accounts.env_errors import EnvErrorGroup
from headrace.schemas.basics.run_files import read_object
from headrace.schemas.errors import RunDirError

log = logging.getLogger("headrace.supervisor")

SUMMARY_FILE = "summary.json"
MOST_PROCESSES = 1000
_PACKAGES = ("headrace", "torch", "numpy", "gymnasium")


class RunFacts:
    """Writes the file. On a full disk the file is missing or old: the error is logged, and the run goes on."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SUMMARY_FILE
        self._about = {"started_unix_s": round(time.time(), 3), "versions": _versions(), "machine": _machine()}
        self._write({"state": "running"})

    def finish(self, summary: Summary, services: Iterable[Service], errors: Iterable[EnvErrorGroup]) -> None:
        """Write how the run ended, with the failures of envs as Redis had them at the end."""
        told: dict[str, Any] = orjson.loads(summary.as_json())
        ended = {"state": "ended", "ended_unix_s": round(time.time(), 3), "problems": list(summary.problems)}
        processes = [_process(service) for service in services][:MOST_PROCESSES]
        self._write({**told, **ended, "processes": processes, "errors": plain_errors(errors)})

    def _write(self, facts: Mapping[str, Any]) -> None:
        try:
            write_private(self._path, orjson.dumps({**facts, **self._about}, option=orjson.OPT_INDENT_2))
        except RunDirError as error:
            log.error("a report of this run will lack how it ended: %s", error)


def read_run_facts(run_dir: Path) -> dict[str, Any]:
    """Return the content of the file; empty where there is none."""
    return read_object(run_dir / SUMMARY_FILE)


def keepers_that_failed(run_dir: Path) -> list[str]:
    """Return which of broker and Redis, in words, failed for good. The run's ledger then lacks the last reports."""
    processes = read_run_facts(run_dir).get("processes")
    entries = [entry for entry in processes if isinstance(entry, dict)] if isinstance(processes, list) else []
    failed = [entry.get("role") for entry in entries if entry.get("state") == ServiceState.FAILED.value]
    return [words for role, words in ((Role.BROKER, "the broker"), (Role.REDIS, "Redis")) if role.value in failed]


def plain_errors(errors: Iterable[EnvErrorGroup]) -> list[dict[str, Any]]:
    """Return groups of failures as plain values, the newest first."""
    groups = sorted(errors, key=lambda group: -group.last_unix_s)
    return [group.model_dump(mode="json", exclude={"lives"}) for group in groups]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"host": platform.node(), "system": platform.platform(), "cpus": os.cpu_count(), "memory_bytes": memory}


def _process(service: Service) -> dict[str, Any]:
    return {
        "name": service.spec.name,
        "role": service.spec.role.value,
        "restarts": service.restarts,
        "state": service.state.value,
        "last_words": service.last_words,
    }

"""Finds a learner's fleet by its run directory, or by its rendezvous."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.schemas.basics.run_files import read_object
from headrace.schemas.credentials.keys import DIR_VARIABLE
from headrace.schemas.errors import ConfigError, UnreachableError, is_there
from headrace.schemas.peers.fleet_address import AddressSource, FirstOf, RunDirAddresses, await_address
from headrace.schemas.peers.fleet_place import not_found_error
from headrace.schemas.peers.rendezvous import RENDEZVOUS_VARIABLE, Rendezvous

Where = str | Path | None
"""A run directory or a rendezvous; None: the rendezvous in the environment."""

_RECORDED = "headrace.deploy.annexes.recording.recorded_stream:RecordedStream"
_FOLDERS = dict.fromkeys(("batches-*.parquet", "unmerged"), _RECORDED)
"""Classes of annexes with the verbs of a stream, each for folders that have such a file or folder."""


def address_sources(
    run_dir: str | Path | None, rendezvous: Where | AddressSource | Sequence[AddressSource], count: int
) -> Sequence[AddressSource | None]:
    """Return the address source of each of `count` brokers; None for a broker whose address never changes.

    Raises `ConfigError` for an invalid rendezvous, and for a list of another length than `count`.
    """
    if isinstance(rendezvous, Sequence) and not isinstance(rendezvous, str):
        if len(rendezvous) != count:
            raise ConfigError(f"there are {len(rendezvous)} for {count} endpoints", key="rendezvous")
        return rendezvous
    if isinstance(rendezvous, str | Path):
        return [Rendezvous(str(rendezvous)), *[None] * (count - 1)]
    if rendezvous is not None or run_dir is None:
        return [rendezvous, *[None] * (count - 1)]
    return [RunDirAddresses(Path(run_dir)), *[None] * (count - 1)]


def as_list(endpoint: str | Sequence[str]) -> list[str]:
    """Return the endpoints of all brokers. Raises `ConfigError` for an empty list."""
    endpoints = [endpoint] if isinstance(endpoint, str) else list(endpoint)
    if not endpoints:
        raise ConfigError("an empty list names no broker; give the address of each", key="endpoint")
    return endpoints


def recorded_kind(where: object) -> str | None:
    """Return the class that reads the folder `where` as a stream; None for any other place."""
    found = isinstance(where, str | Path) and is_there(Path(where))
    return next((kind for pattern, kind in _FOLDERS.items() if found and any(Path(str(where)).glob(pattern))), None)


def find_fleet(
    where: Where | Sequence[Where], connect_timeout_s: float, options: Mapping[str, Any]
) -> tuple[str | list[str], dict[str, Any]]:
    """Return a fleet's address for learners, once its broker serves, and the options to connect with.

    `where` is a run directory, or a rendezvous: a file or URL, whose name ends in .json unless the file is there
    already. None: the rendezvous in HEADRACE_FLEET__RENDEZVOUS. A fleet of several brokers has a list of places, and
    gets a list of addresses: "" for a broker that does not serve. Keys are those in the config of the run, unless
    `options` has others. Raises `UnreachableError` when no broker serves within `connect_timeout_s`, and
    `ConfigError` if `where` names no place.
    """
    several = isinstance(where, Sequence) and not isinstance(where, str)
    places = list(where) if isinstance(where, Sequence) and not isinstance(where, str) else [where]
    for place in filter(recorded_kind, places):
        raise ConfigError(f"{place} is a recording and has no fleet; EpisodeStream.of or StreamDataset reads it")
    sources = [_source_at(place) for place in places]
    if not sources:
        raise ConfigError("an empty list names no fleet; give a run directory or a rendezvous for each broker")
    await_address(FirstOf(sources), "learner", connect_timeout_s)
    endpoints = [source.find("learner") for source in sources]
    if not any(endpoints):
        raise _unreachable(FirstOf(sources), sources[0].problem, connect_timeout_s)
    found: dict[str, Any] = {"rendezvous": sources if several else sources[0]}
    if isinstance(sources[0], RunDirAddresses):
        found["keys"] = keys_folder(sources[0].path)
        found["run_dir"] = sources[0].path
    return endpoints if several else endpoints[0], {**found, "connect_timeout_s": connect_timeout_s, **options}


def _source_at(where: Where) -> AddressSource:
    where = os.environ.get(RENDEZVOUS_VARIABLE, "") if where is None else where
    if not where:
        raise ConfigError(f"give a run directory or a rendezvous, or set {RENDEZVOUS_VARIABLE}")
    named = os.environ.get(RENDEZVOUS_VARIABLE)
    is_rendezvous = str(where) == named or "://" in str(where) or Path(where).suffix == ".json"
    if is_rendezvous or (is_there(Path(where)) and Path(where).is_file()):
        return Rendezvous(str(where))
    return RunDirAddresses(Path(where))


def await_start(run_dir: Path, timeout_s: float) -> None:
    """Wait until the fleet in `run_dir` runs: it has started, and has not stopped.

    Raises `UnreachableError` when that takes longer than `timeout_s`.
    """
    source = RunDirAddresses(run_dir, running=True)
    if not await_address(source, "learner", timeout_s):
        raise _unreachable(source, source.problem, timeout_s)


def _unreachable(source: AddressSource, problem: str, waited_s: float) -> UnreachableError:
    """Return the error for a fleet without a broker: it has ended, or else `problem` says why."""
    if (ended := source.stopped()) is not None:
        return UnreachableError("broker", "", waited_s, sentence=str(ended))
    return not_found_error("broker", problem, waited_s)


def keys_folder(run_dir: str | Path) -> str | None:
    """Return the folder of keys in the config of the fleet in `run_dir`; None: as the environment says, or none."""
    section = read_object(Path(run_dir) / "config.json").get("keys", {})
    return None if DIR_VARIABLE in os.environ else section.get("dir") or None

"""Faults of envs on an env host: each costs only its env's unfinished steps, with a reason, and the worker goes on.

Each lane has a fault of its own, so that one worker and one host go through many of them at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.schemas.peers.socket_folder import make_socket_folder
from headrace.workers.envs import restarts
from support.envs import remote_faults
from support.envs.fault_table import BAD_DATA, BURDENS, DEATHS, HANGS
from support.fleets.env_hosts import EnvHosts
from support.pipeline.delivery import BrokerThread
from support.pipeline.fault_runs import ENOUGH, brief, check_alike, lives_of
from support.pipeline.worker_threads import WorkerThread
from support.runners.process_driver import is_running

pytestmark = pytest.mark.processes

Cell = dict[str, Any]
Lives = dict[int, list[EpisodeChunk]]
SOUND: Cell = {}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[EnvHosts]:
    remote_faults.noted.clear()
    with EnvHosts(tmp_path, socket_dir=make_socket_folder(tmp_path)) as started:
        yield started


@pytest.fixture
def worker_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(broker: BrokerThread, cells: list[Cell], folder: str, **sampling: Any) -> WorkerThread:
        settings = {"num_envs": len(cells), "rollout_fragment_length": 8, "seed": 5, "env_config": {"cells": cells}}
        monkeypatch.setattr(restarts, "BACKOFF_S", 600.0)
        noting = {"env": "support.envs.remote_faults:Assigned", "callbacks": ["support.envs.remote_faults:Noting"]}
        sections = {
            "fleet": {"run_dir": str(tmp_path)},
            "sampling": {**noting, **settings, **sampling},
            "broker": {"lease_s": 60.0},
            "worker": {"random_actions_before_weights": True},
        }
        return WorkerThread(monkeypatch, broker.endpoints.worker, tmp_path / folder, sections)

    return make


def _run(
    cells: list[Cell], gone: set[int], start_broker: Any, worker_of: Any, hosts: EnvHosts, tmp_path: Path, *sets: str
) -> Lives:
    """The lives of all lanes; those in `gone` fail twice and do not come back. What never failed is as inline."""
    sound_cells = [SOUND] * len(cells)
    for folder in ("sound", "remote"):
        (tmp_path / folder).mkdir()
    broker = start_broker(run_dir=tmp_path / "sound")
    sound = lives_of(broker, worker_of(broker, sound_cells, "sound"), range(len(cells)))
    broker.stop()
    table = str(cells).replace("'", '"').replace("True", "true")
    host = hosts.start(
        "support.envs.remote_faults:Assigned", len(cells), f'sampling.env_config={{"cells": {table}}}', *sets
    )
    remote = {"env_placement": "remote"}
    broker = start_broker(run_dir=tmp_path / "remote")

    def are_gone() -> bool:
        return all(len(_told(lane)) == 2 for lane in gone)

    back = set(range(len(cells))) - gone
    lives = lives_of(broker, worker_of(broker, cells, "remote", **remote), back, are_gone)
    for lane in set(range(len(cells))) - {lane for lane, _ in remote_faults.noted}:
        check_alike(brief(lives[lane]), brief(sound[lane]))
    children = _children(host.pid)
    host.terminate()
    assert host.wait(100) == 0
    assert not any(map(is_running, children))
    return lives


def _children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def _told(lane: int) -> list[str]:
    return [sentence for index, sentence in remote_faults.noted if index == lane]


def test_bad_answers_and_exceptions_of_an_env_affect_that_env_alone(
    start_broker: Any, worker_of: Any, hosts: EnvHosts, tmp_path: Path
) -> None:
    raised = {"raises": "EnvRaisedError: RuntimeError: diverged", "asks": "StepFailedRecreateEnv"}
    at_step = {**{fault: f"EnvContractError: {words}" for fault, words in BAD_DATA.items()}, **raised}
    cells: list[Cell] = [SOUND, *({"faults": {"step": fault}} for fault in at_step)]
    cells += [{"faults": {"reset": "raises"}}, {"faults": {"step": "raises", "close": "raises"}}]
    cells += [{"faults": {"step": burden}, "pids": str(tmp_path / "pids")} for burden in BURDENS]
    cells += [{"faults": {"step": "raises"}, "again": {"construction": "raises"}}, SOUND]
    gone = len(cells) - 2
    lives = _run(cells, {gone}, start_broker, worker_of, hosts, tmp_path, "sampling.envs_per_process=6")
    words = dict(enumerate([*at_step.values(), *[raised["raises"]] * 2], start=1))
    assert {lane for lane, _ in remote_faults.noted} == {*words, gone}
    for lane, sentence in words.items():
        (told,) = _told(lane)
        assert re.match(sentence, told)
    assert [told.partition(" (")[0] for told in _told(gone)] == [raised["raises"]] * 2
    assert sum(map(len, lives[gone])) < ENOUGH
    left = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert left
    assert not any(map(is_running, left))


@pytest.mark.thorough
def test_hangs_crashes_and_leaks_of_an_env_affect_that_env_alone(
    start_broker: Any, worker_of: Any, hosts: EnvHosts, tmp_path: Path
) -> None:
    places = ("step", "reset", "close", "construction")
    hangs = [(place, fault) for place in places for fault in HANGS]
    cells: list[Cell] = [SOUND]
    for place, fault in hangs:
        with_it = {"faults": {"step": "raises"}, "again": {place: fault}} if place == "construction" else {}
        cells.append(with_it or {"faults": {"step": "raises", place: fault}})
    cells += [{"faults": {"step": fault}} for fault in DEATHS]
    cells += [{"leaks": True}, SOUND]
    gone = {1 + n for n, (place, _) in enumerate(hangs) if place == "construction"}
    limits = {"step": 1.0, "reset": 2.0}
    sets = [f"sampling.env_{name}_timeout_s={limit}" for name, limit in limits.items()]
    sets += ["sampling.envs_per_process=1", "sampling.env_process_max_rss_mb=200"]
    lives = _run(cells, gone, start_broker, worker_of, hosts, tmp_path, *sets)
    raised = r"EnvRaisedError: RuntimeError: diverged"
    for lane, (place, fault) in enumerate(hangs, start=1):
        late = f"EnvHangError: env {lane} did not return from {place} within "
        expected = {"construction": [raised, late], "close": [raised]}.get(place, [late])
        told = _told(lane)
        assert len(told) == len(expected), (place, fault, told)
        assert all(re.match(words, sentence) for words, sentence in zip(expected, told, strict=True)), (fault, told)
    for lane, cause in enumerate(DEATHS.values(), start=1 + len(hangs)):
        (sentence,) = _told(lane)
        assert re.match(f"EnvCrashError: .* ended by {cause} in step", sentence)
    leaking = len(cells) - 2
    assert {lane for lane, _ in remote_faults.noted} - {leaking} == set(range(1, leaking))
    assert all("far above env_process_max_rss_mb = 200" in sentence for sentence in _told(leaking))
    assert len({info["pid"] for chunk in lives[leaking] for info in chunk.infos if "pid" in info}) > 1

"""A process that joins a fleet: whose settings it takes, and how often it reads them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.broker.batches.limits import BrokerState
from headrace.broker.files.state_file import Endpoints, write_broker_file
from headrace.deploy.fleet import roles
from headrace.deploy.run import options
from headrace.deploy.run.fleet_file import FleetFile
from headrace.deploy.run.joining import join, join_worker
from headrace.deploy.run.options import Asked
from headrace.deploy.run.several_brokers import at_broker
from headrace.schemas.peers.rendezvous import Published
from headrace.schemas.settings.config_loading import build_config, load_config

AT = {"worker": "tcp://127.0.0.1:1", "learner": "tcp://127.0.0.1:2", "envs-0": "tcp://127.0.0.1:3"}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """The file of each resolution of settings, in order; None for one without a file."""
    files: list[Path | None] = []

    def load(path: Path | None, flags: dict[str, Any]) -> Any:
        files.append(path)
        return load_config(path, flags)

    monkeypatch.setattr(options, "load_config", load)
    return files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The run directory of a fleet that runs, with settings of its own."""
    folder = tmp_path / "run"
    folder.mkdir()
    sampling = {"num_envs": 3, "env_placement": "remote"}
    write_config(folder, fleet={"workers": 1}, sampling=sampling)
    FleetFile(fleet_id="f", state="running", endpoints=AT).write(folder / "fleet.json")
    return folder


def write_config(folder: Path, **sections: Any) -> None:
    (folder / "config.json").write_bytes(orjson.dumps(build_config(sections).model_dump(mode="json")))


def test_a_worker_with_an_address_reads_its_settings_once(tmp_path: Path, read: list[Path | None]) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[sampling]\nnum_envs = 5\n")
    flags = {"fleet.fleet_id": "f", "fleet.run_dir": str(tmp_path)}
    joined = join(Asked(file, flags=flags, allow=()), AT["worker"], "worker", 0)
    assert joined is not None
    assert (joined.config.sampling.num_envs, joined.fleet_id, joined.endpoint) == (5, "f", AT["worker"])
    assert joined.origin.startswith(str(file))
    assert joined.origin.endswith(" + 2 flags")
    assert read == [file]


def test_a_worker_at_a_rendezvous_reads_its_settings_once(
    tmp_path: Path, read: list[Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Published(fleet_id="f", endpoints=AT).write(tmp_path / "meet.json")
    joined = join(Asked(flags={"fleet.rendezvous": "meet.json"}, allow=()), None, "worker")
    assert joined is not None
    assert (joined.fleet_id, joined.endpoint) == ("f", AT["worker"])
    assert (joined.config.fleet.fleet_id, joined.config.fleet.run_dir) == ("f", "runs/f")
    assert read == [None]


@pytest.mark.parametrize("role", ["worker", "learner", "env-host"])
def test_a_process_of_a_run_takes_the_settings_of_the_run_once(role: str, run: Path, read: list[Path | None]) -> None:
    asked = Asked(sets=["sampling.seed=7"], flags={"fleet.run_dir": str(run)}, allow=())
    joined = join_worker(asked, None, None) if role == "env-host" else join(asked, None, role)
    assert joined is not None
    assert joined.endpoint == AT["envs-0" if role == "env-host" else role]
    assert (joined.config.sampling.num_envs, joined.config.sampling.seed, joined.fleet_id) == (3, 7, "f")
    assert joined.config.fleet.run_dir == str(run)
    assert read == [run / "config.json"]


@pytest.mark.parametrize("role", ["worker", "broker", "learner", "env-host"])
def test_the_start_of_a_process_resolves_its_settings_once(
    role: str, run: Path, read: list[Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command to the call of the part that gets the settings."""
    called: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_, **__: called.append(name)

    monkeypatch.setattr(roles, "part", note)
    monkeypatch.setattr("headrace.workers.fleet.worker.run_worker", note("run_worker"))
    monkeypatch.setattr("headrace.broker.process.run_broker", note("run_broker"))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    asked = Asked(flags={"fleet.run_dir": str(run), "fleet.rendezvous": None}, allow=())
    if role == "worker":
        roles.start_worker(asked, endpoint=None, slot=None, incarnation=0)
    elif role == "broker":
        roles.start_broker(asked)
    elif role == "learner":
        roles.start_learner(asked, endpoint=None)
    else:
        roles.start_env_host(asked, connect=None, slot=None)
    assert called[-1] == f"run_{role}".replace("-", "_")
    assert read == [run / "config.json"]


def test_a_broker_alone_goes_on_with_the_fleet_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    monkeypatch.setattr(roles, "part", lambda _: lambda *_: None)
    monkeypatch.setattr("headrace.broker.process.run_broker", lambda *_, fleet_id, **__: served.append(fleet_id))
    asked = Asked(flags={"fleet.run_dir": str(tmp_path)}, allow=())
    roles.start_broker(asked)
    write_broker_file(tmp_path, served[0], Endpoints(worker="a", learner="b", weights="c"), BrokerState())
    roles.start_broker(asked)
    assert served[0] == served[1] != ""


def test_a_learner_of_a_run_knows_the_fleet_that_it_joined(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name the learner tells whether the checkpoint in the folder is of another fleet."""
    told: list[str] = []
    monkeypatch.setattr(roles, "part", lambda name: lambda config, *_, **__: told.append(config.fleet.fleet_id))
    roles.start_learner(Asked(flags={"fleet.run_dir": str(run), "fleet.rendezvous": None}, allow=()), endpoint=None)
    assert set(told) == {"f"}


def test_a_process_that_waited_for_its_run_takes_the_settings_with_which_it_started(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = FleetFile(fleet_id="f", state="stopped", endpoints=AT)
    stopped.write(run / "fleet.json")

    def await_place(*_: Any) -> str:
        write_config(run, sampling={"num_envs": 4})
        stopped.model_copy(update={"state": "running"}).write(run / "fleet.json")
        return AT["worker"]

    monkeypatch.setattr("headrace.deploy.run.joining.await_place", await_place)
    joined = join(Asked(flags={"fleet.run_dir": str(run)}), None, "worker")
    assert joined is not None
    assert joined.config.sampling.num_envs == 4


def test_a_run_directory_in_the_environment_counts_as_the_flag_does(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_FLEET__RUN_DIR", str(run))
    for endpoint in (None, AT["worker"]):
        joined = join(Asked(), endpoint, "worker")
        assert joined is not None
        assert (joined.config.sampling.num_envs, joined.config.fleet.run_dir) == (3, str(run))


def test_a_file_that_the_user_names_stands_before_that_of_the_run(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text("[sampling]\nnum_envs = 5\n")
    joined = join(Asked(file, flags={"fleet.run_dir": str(run)}), None, "worker")
    assert joined is not None
    assert joined.config.sampling.num_envs == 5


def test_a_worker_of_one_of_several_brokers_may_have_any_bound_of_held_batches(tmp_path: Path) -> None:
    """Several brokers hold the batches of an update together. A group writes these settings for its workers."""
    fleet, broker = {"fleet_id": "pair", "run_dir": str(tmp_path)}, {"count": 2, "max_held_batches": 1}
    share = at_broker(build_config({"fleet": fleet, "broker": broker}), 1)
    again = build_config(share.model_dump(mode="json"))
    assert (again.fleet.fleet_id, again.broker.count) == ("pair.1", 1)

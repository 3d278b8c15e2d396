"""The choice of a worker among those of a rendezvous, by env hosts and clients that name no slot."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from headrace.schemas.peers.rendezvous import Port, Published, Rendezvous
from headrace.schemas.peers.worker_port_choice import WorkerPortChoice


def publish(path: Path, **ports: Port | str) -> None:
    found = {
        name.replace("_", "-"): port if isinstance(port, Port) else Port(address=port) for name, port in ports.items()
    }
    Published(fleet_id="demo", endpoints={}, ports=found).write(path)


def lacking(address: str) -> Port:
    return Port(address=address, lacks_hosts=True)


@pytest.fixture
def meet(tmp_path: Path) -> Path:
    return tmp_path / "meet.json"


@pytest.fixture
def choice(meet: Path) -> WorkerPortChoice:
    return WorkerPortChoice(Rendezvous(str(meet)), "envs")


def test_a_worker_that_lacks_hosts_is_chosen_first_and_kept_while_published(
    meet: Path, choice: WorkerPortChoice
) -> None:
    assert choice.find() == ""
    assert "cannot be read" in choice.problem
    publish(meet, **{f"envs_{slot}": f"tcp://a:{slot + 1}" for slot in range(20)}, envs_20=lacking("tcp://a:99"))
    assert choice.find() == "tcp://a:99"
    publish(meet, envs_3=lacking("tcp://b:4"), envs_20="tcp://a:98")
    assert choice.find() == "tcp://a:98", "it has moved"
    publish(meet, envs_3=lacking("tcp://b:4"))
    assert choice.find() == "tcp://b:4"
    assert choice.problem == ""


def test_hosts_that_come_at_once_spread_over_the_workers(meet: Path) -> None:
    publish(meet, **{f"envs_{slot}": lacking(f"tcp://a:{slot + 1}") for slot in range(4)})
    chosen = {WorkerPortChoice(Rendezvous(str(meet)), "envs").find() for _ in range(200)}
    assert len(chosen) == 4


def test_a_host_moves_only_from_a_worker_with_hosts_to_one_that_lacks_hosts(
    meet: Path, choice: WorkerPortChoice
) -> None:
    publish(meet, envs_0="tcp://a:1")
    choice.find()
    assert choice.elsewhere() == ""
    publish(meet, envs_0=lacking("tcp://a:1"), envs_1=lacking("tcp://a:2"))
    assert choice.elsewhere() == ""
    publish(meet, envs_0="tcp://a:1", envs_1=lacking("tcp://a:2"))
    assert (choice.elsewhere(), choice.find()) == ("tcp://a:2", "tcp://a:2")
    fixed = WorkerPortChoice(Rendezvous(str(meet)), "envs", slot=0)
    assert (fixed.find(), fixed.elsewhere()) == ("tcp://a:1", "")


@pytest.mark.parametrize(
    "port",
    [
        Port(address="tcp://127.0.0.1:1", host="elsewhere"),
        Port(address="tcp://a:1", key="0123456789abcdef"),
        Port(address="http://a:1"),
    ],
)
def test_workers_that_this_peer_cannot_use_do_not_count(meet: Path, port: Port) -> None:
    publish(meet, envs_0=port, clients_0="tcp://a:2")
    choice = WorkerPortChoice(Rendezvous(str(meet)), "envs", key="fedcba9876543210")
    assert choice.find() == ""
    assert choice.problem == f"{meet} names no worker that serves env hosts of this machine with these keys"
    publish(meet, envs_0=Port(address="tcp://127.0.0.1:1", host=platform.node(), key="fedcba9876543210"))
    assert choice.find() == "tcp://127.0.0.1:1"


def test_ports_of_a_fleet_that_has_stopped_do_not_count(meet: Path, choice: WorkerPortChoice) -> None:
    publish(meet, envs_0="tcp://a:1")
    found = Rendezvous(str(meet)).look()
    assert found is not None
    found.model_copy(update={"state": "stopped"}).write(meet)
    assert choice.find() == ""
    assert "has stopped" in choice.problem
    assert "has stopped" in str(choice.stopped())

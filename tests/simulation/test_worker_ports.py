"""Ports that workers report in heartbeats: the broker publishes only the ports of live workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.batches.limits import BrokerLimits
from headrace.broker.files import rendezvous_file
from headrace.broker.files.rendezvous_file import RendezvousFile
from headrace.broker.ports import worker_ports
from headrace.broker.ports.worker_ports import WorkerPorts
from headrace.broker.sessions.core import BrokerCore
from headrace.deploy.run.key_pairs import make_keys
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.accounts.worker_figures import Ports
from headrace.schemas.credentials.key_files import read_public_key
from headrace.schemas.credentials.keys import read_broker_keys
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages import Bye, Heartbeat, WorkerHello, read
from headrace.schemas.peers.rendezvous import Port, Published, Rendezvous
from support.waiting import wait_until

LEASE_S = BrokerLimits().lease_s


class Fleet:
    """A core, and the file that its broker keeps."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.now = 0.0
        self.core = BrokerCore("fleet", BrokerLimits(**options))
        self.file = RendezvousFile(path, Published(fleet_id="fleet", endpoints={}, epoch=1))
        self.ports = WorkerPorts(self.core, self.file, None)
        self._rendezvous = Rendezvous(str(path))

    def say(self, message: Any, peer: bytes = b"w") -> None:
        self.core.receive(peer, message, self.now)

    def join(self, slot: int, incarnation: int = 1, **told: str) -> None:
        """Let a life of a worker begin, and tell its ports."""
        peer = b"w%d-%d" % (slot, incarnation)
        token = f"{slot}-{incarnation}"
        self.say(WorkerHello(fleet_id="fleet", token=token, slot=slot, incarnation=incarnation, host="node"), peer)
        if told:
            self.say(beat(slot, incarnation, told), peer)

    def follow(self, later_s: float = 1.0) -> None:
        self.now += later_s
        self.core.tick(self.now)
        self.ports.tick(self.now)

    def publishes(self, **addresses: str) -> bool:
        found = self._rendezvous.look()
        expected = {name.replace("_", "-"): address for name, address in addresses.items()}
        return found is not None and {name: port.address for name, port in found.ports.items()} == expected


def beat(slot: int, incarnation: int, ports: Any, **more: Any) -> Heartbeat:
    return Heartbeat(slot=slot, incarnation=incarnation, totals=WorkerTotals(), ports=Ports(**ports), **more)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(rendezvous_file, "LIFETIME_S", 1000.0)  # it writes only when a port changes
    made = Fleet(tmp_path / "meet.json")
    yield made
    made.file.close(stopped=False)


def test_old_ports_stay_published_until_a_restarted_worker_reports_new_ports(fleet: Fleet) -> None:
    fleet.join(3, envs="tcp://a:1", http="http://a:2")
    fleet.follow()
    wait_until(lambda: fleet.publishes(envs_3="tcp://a:1", http_3="http://a:2"), "its ports")
    fleet.join(3, 2)
    fleet.follow()
    assert fleet.publishes(envs_3="tcp://a:1", http_3="http://a:2")
    fleet.say(beat(3, 2, {"envs": "tcp://b:1"}), b"w3-2")
    fleet.follow()
    wait_until(lambda: fleet.publishes(envs_3="tcp://b:1", http_3="http://a:2"), "its new port")
    fleet.follow(LEASE_S - 2.0)
    wait_until(lambda: fleet.publishes(envs_3="tcp://b:1"), "the end of the old life's lease")
    fleet.follow(LEASE_S)
    wait_until(fleet.publishes, "the end of its lease")


def test_the_port_of_a_worker_that_leaves_is_removed_immediately(fleet: Fleet) -> None:
    fleet.join(1, envs="tcp://a:1")
    fleet.join(2, clients="tcp://a:2")
    fleet.follow()
    wait_until(lambda: fleet.publishes(envs_1="tcp://a:1", clients_2="tcp://a:2"), "both")
    fleet.say(Bye(slot=1, incarnation=1, totals=WorkerTotals(), settled=Settled()), b"w1-1")
    fleet.follow()
    wait_until(lambda: fleet.publishes(clients_2="tcp://a:2"), "the other one")


def test_the_broker_publishes_which_workers_lack_env_hosts(fleet: Fleet) -> None:
    fleet.join(1)
    fleet.say(beat(1, 1, {"envs": "tcp://a:1"}, env_hosts=(0, 1)), b"w1-1")
    fleet.join(2)
    fleet.say(beat(2, 1, {"envs": "tcp://a:2"}, env_hosts=(2, 2)), b"w2-1")
    published: dict[str, Port] = {}
    fleet.ports._file = type("File", (), {"publish": staticmethod(published.update)})()  # type: ignore[assignment]
    fleet.follow()
    assert {name: (port.host, port.lacks_hosts) for name, port in published.items()} == {
        "envs-1": ("node", True),
        "envs-2": ("node", False),
    }


def test_a_file_has_a_bounded_number_of_ports(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_ports, "MOST_PORTS", 2)
    for slot in range(4):
        fleet.join(slot, envs=f"tcp://a:{slot + 1}")
    fleet.follow()
    wait_until(lambda: fleet.publishes(envs_0="tcp://a:1", envs_1="tcp://a:2"), "the first two")
    assert caplog.text.count("and others are not published: a rendezvous has at most 2 ports") == 1


def test_the_fingerprint_belongs_to_the_key_of_the_workers_group(tmp_path: Path) -> None:
    make_keys(tmp_path)
    known = read_broker_keys(tmp_path).known
    found = WorkerPorts(BrokerCore("f", BrokerLimits()), None, known)._fingerprints()  # type: ignore[arg-type]
    assert found == {"": read_public_key(tmp_path / "worker.public").fingerprint}


@pytest.mark.parametrize(
    "ports",
    [
        {"envs": "http://a:1"},
        {"http": "tcp://a:1"},
        {"envs": "tcp://a:65536"},
        {"envs": "tcp://-:1"},
        {"envs": "tcp://a b:1"},
        {"envs": f"tcp://{'a' * 200}:1"},
        {"envs": 5},
    ],
)
def test_an_address_to_which_no_peer_can_connect_is_refused(ports: dict[str, Any]) -> None:
    header = {"slot": 0, "incarnation": 1, "totals": WorkerTotals().model_dump(), "ports": ports}
    with pytest.raises(DecodeError, match="bad_message: Heartbeat: ports"):
        read(Heartbeat, header)

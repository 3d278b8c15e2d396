"""The rendezvous of a fleet: the addresses that peers read there, and errors for content that is malformed."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import pytest

from headrace.broker.files import rendezvous_file
from headrace.broker.files.rendezvous_file import RendezvousFile, note_stopped
from headrace.deploy.annexes.watch.page import app as page
from headrace.learner_stub import EpisodeStream
from headrace.learner_stub.link.fleet_place import find_fleet
from headrace.schemas.credentials.keys import ClientKeys, check_fingerprint
from headrace.schemas.errors import ConfigError, KeysError, RunDirError, UnreachableError
from headrace.schemas.peers import advertised as advertising
from headrace.schemas.peers.advertised import advertised, host_to_advertise
from headrace.schemas.peers.fleet_place import FleetPlace
from headrace.schemas.peers.http_hosts import BY_PROGRAM
from headrace.schemas.peers.rendezvous import RENDEZVOUS_VARIABLE, Published, Rendezvous
from headrace.schemas.settings.config_loading import build_config
from support.waiting import wait_until

AT = {"worker": "tcp://node1:5701", "learner": "tcp://node1:5702", "weights": "tcp://node1:5703"}


def published(**changes: object) -> Published:
    return Published.model_validate({"fleet_id": "demo", "endpoints": AT, **changes})


def test_peers_of_each_role_find_their_address(tmp_path: Path) -> None:
    path = tmp_path / "meet.json"
    rendezvous = Rendezvous(str(path))
    assert rendezvous.find("worker") == ""
    assert rendezvous.problem == f"{path} cannot be read (No such file or directory)"
    published().write(path)
    assert [rendezvous.find(role) for role in AT] == list(AT.values())
    assert rendezvous.problem == ""
    assert rendezvous.find("envs-3") == ""
    assert rendezvous.problem == f"{path} names no address for envs-3"
    assert path.stat().st_mode & 0o777 == 0o644, "it holds no secret, and other users' peers read it"


def test_a_stopped_fleet_and_an_expired_rendezvous_are_reported_differently(tmp_path: Path) -> None:
    rendezvous = Rendezvous(str(tmp_path / "meet.json"))
    published(state="stopped").write(tmp_path / "meet.json")
    assert rendezvous.find("worker") == ""
    assert "fleet demo of" in str(rendezvous.stopped())
    published(expires_unix_s=time.time() - 100).write(tmp_path / "meet.json")
    assert rendezvous.find("worker") == ""
    assert rendezvous.stopped() is None
    assert "expired 100 s ago: its broker has gone, or the clocks" in rendezvous.problem


def test_a_broker_on_loopback_is_not_looked_for_on_another_machine(tmp_path: Path) -> None:
    rendezvous = Rendezvous(str(tmp_path / "meet.json"))
    published(host="elsewhere", endpoints={"worker": "tcp://127.0.0.1:5701"}).write(tmp_path / "meet.json")
    assert rendezvous.find("worker") == ""
    assert "serves elsewhere alone, at tcp://127.0.0.1:5701; set broker.host there" in rendezvous.problem


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no json",
        b"[]",
        b"null",
        orjson.dumps({"version": 2, "fleet_id": "demo", "endpoints": AT}),
        orjson.dumps({"fleet_id": "demo/../x", "endpoints": AT}),
        orjson.dumps({"fleet_id": "demo", "endpoints": {"worker": "http://node1:5701"}}),
        orjson.dumps({"fleet_id": "demo", "endpoints": {"worker": "tcp://node1:0"}}),
        orjson.dumps({"fleet_id": "demo", "endpoints": {"worker": 5}}),
        orjson.dumps({"fleet_id": "demo", "endpoints": AT, "epoch": 1 << 63}),
        orjson.dumps({"fleet_id": "demo", "endpoints": AT, "expires_unix_s": "soon"}),
        orjson.dumps({"fleet_id": "demo", "endpoints": {f"envs-{n}": "tcp://a:1" for n in range(5000)}}),
    ],
)
def test_content_that_is_no_rendezvous_is_reported_as_a_problem(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "meet.json").write_bytes(content)
    rendezvous = Rendezvous(str(tmp_path / "meet.json"))
    assert rendezvous.look() is None
    assert "is no rendezvous (" in rendezvous.problem


ODD_PORTS = ("*:80", ".:5", "a:65536", "a;b:5", "[::1:5", "a\0:5", "\u00e9:5", f"{'a' * 260}:5")
ODD_SOCKETS = ("x", "@x", "/a\0b", f"/{'a' * 120}")


@pytest.mark.parametrize(
    "address",
    [*(f"tcp://{odd}" for odd in ODD_PORTS), *(f"ipc://{odd}" for odd in ODD_SOCKETS), "file:///etc/passwd"],
)
def test_an_address_that_no_peer_can_connect_to_is_named_and_not_used(tmp_path: Path, address: str) -> None:
    """libzmq raises an error in the call that connects, and that would end a worker."""
    content = {"fleet_id": "demo", "endpoints": {**AT, "worker": address}}
    (tmp_path / "meet.json").write_bytes(orjson.dumps(content))
    rendezvous = Rendezvous(str(tmp_path / "meet.json"))
    assert rendezvous.find("worker") == ""
    assert "an address should be tcp://HOST:PORT or ipc:///PATH, got " in rendezvous.problem
    assert repr(address)[:40] in rendezvous.problem


def test_a_unix_socket_in_a_folder_that_others_can_use_is_named_and_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    published(endpoints={"worker": f"ipc://{tmp_path}/open/worker"}).write(tmp_path / "meet.json")
    rendezvous = Rendezvous(str(tmp_path / "meet.json"))
    assert rendezvous.find("worker") == ""
    assert f"names 'ipc://{tmp_path}/open/worker', which is not used: " in rendezvous.problem


def test_a_pipe_in_the_place_of_a_rendezvous_holds_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "meet.json")
    rendezvous = Rendezvous(str(tmp_path / "meet.json"))
    assert rendezvous.find("worker") == ""
    assert rendezvous.problem == f"{tmp_path / 'meet.json'} cannot be read (meet.json is no regular file)"


def test_a_peer_does_not_follow_its_rendezvous_to_another_fleet(tmp_path: Path) -> None:
    path = tmp_path / "meet.json"
    rendezvous = Rendezvous(str(path))
    rendezvous.fleet_id = "demo"
    place = FleetPlace(AT["worker"], "worker", rendezvous, patience_s=60.0)
    place.observe(True, 0.0)
    published(fleet_id="other", endpoints={"worker": "tcp://node9:9"}).write(path)
    assert place.observe(False, 1.0) is None
    assert rendezvous.problem == f"{path} is of fleet 'other', not of 'demo'"
    published(fleet_id="other", state="stopped").write(path)
    assert rendezvous.stopped() is None
    published(endpoints={"worker": "tcp://node2:9"}).write(path)
    assert place.observe(False, 2.0) == "tcp://node2:9"


class OnlyForPrograms(SimpleHTTPRequestHandler):
    """Serves files to programs, as the fleet's page serves its rendezvous at a name that it does not know."""

    def do_GET(self) -> None:
        if BY_PROGRAM in self.headers:
            super().do_GET()
        else:
            self.send_error(421)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    handler = partial(OnlyForPrograms, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_page_serves_the_fields_of_a_rendezvous_and_nothing_else(tmp_path: Path) -> None:
    named = build_config({"fleet": {"rendezvous": str(tmp_path / "named.json")}})
    for config, path in ((None, tmp_path / "rendezvous.json"), (named, tmp_path / "named.json")):
        path.write_bytes(orjson.dumps({**published().model_dump(), "secret": "word", "keys": {"broker": "0f"}}))
        served = orjson.loads(page.published(tmp_path, config))
        assert served == {**published().model_dump(), "keys": {"broker": "0f"}}
    with pytest.raises(ValueError, match="the fleet's run directory is not on this machine"):
        page.published(None, None)


def test_a_url_is_read_in_the_background_and_again_when_its_content_changes(
    tmp_path: Path, web: ThreadingHTTPServer, capfd: pytest.CaptureFixture[str]
) -> None:
    rendezvous = Rendezvous(f"http://127.0.0.1:{web.server_port}/meet.json")
    assert rendezvous.find("worker") == ""
    wait_until(lambda: rendezvous.look() is None and "404" in rendezvous.problem, "the answer that there is none")
    published().write(tmp_path / "meet.json")
    wait_until(lambda: rendezvous.find("worker") == AT["worker"], "the address")
    published(endpoints={"worker": "tcp://node2:9"}).write(tmp_path / "meet.json")
    wait_until(lambda: rendezvous.find("worker") == "tcp://node2:9", "the address after a move")


def test_a_dns_rendezvous_gives_the_configured_ports_of_the_broker() -> None:
    rendezvous = Rendezvous("dns://broker.demo", {"worker": 5701, "learner": 5702})
    assert rendezvous.find("learner") == "tcp://broker.demo:5702"
    for where, message in (
        ("dns://broker:5701", "dns://NAME, without a port"),
        ("dns://", "dns://NAME"),
        ("dns://a@b", "dns://NAME"),
        ("ftp://broker/meet.json", "a path, http"),
    ):
        with pytest.raises(ConfigError, match=message):
            Rendezvous(where, {"worker": 5701})
    with pytest.raises(ConfigError, match=r"needs broker\.port in the settings"):
        Rendezvous("dns://broker", {"worker": 0})


def test_a_peer_follows_a_broker_that_has_moved(tmp_path: Path) -> None:
    published().write(tmp_path / "meet.json")
    place = FleetPlace(AT["worker"], "worker", Rendezvous(str(tmp_path / "meet.json")), patience_s=60.0)
    place.observe(True, 0.0)
    assert place.observe(False, 1.0) is None
    published(endpoints={"worker": "tcp://node2:9"}).write(tmp_path / "meet.json")
    assert place.observe(False, 2.0) == "tcp://node2:9"
    published(state="stopped").write(tmp_path / "meet.json")
    for second in range(3, 70):
        place.observe(False, float(second))
    assert "has stopped" in str(place.ended)


def test_note_stopped_marks_only_a_rendezvous_of_a_broker_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "meet.json"
    note_stopped(path)
    assert not path.exists()
    published(host="elsewhere").write(path)
    note_stopped(path)
    assert Rendezvous(str(path)).stopped() is None
    published(host=platform.node(), expires_unix_s=1.0).write(path)
    note_stopped(path)
    found = Rendezvous(str(path))
    assert found.stopped() is not None
    assert not found.at_goal
    note_stopped(path, at_goal=True)
    assert found.stopped() is not None
    assert found.at_goal
    published(host="elsewhere", state="stopped").write(path)
    note_stopped(path, at_goal=True)
    assert found.stopped() is not None
    assert not found.at_goal


def test_a_broker_rewrites_its_rendezvous_and_leaves_it_to_a_later_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous_file, "LIFETIME_S", 0.2)
    path = tmp_path / "new" / "meet.json"
    rendezvous = Rendezvous(str(path))
    first = RendezvousFile(path, published(epoch=1))
    path.unlink()
    wait_until(lambda: rendezvous.find("worker"), "the file again")
    with pytest.raises(RunDirError, match=r"fleet demo publishes its addresses in meet\.json"):
        RendezvousFile(path, published(fleet_id="other"))
    second = RendezvousFile(path, published(epoch=2, endpoints={"worker": "tcp://node2:9"}))
    wait_until(lambda: "is of a later broker now" in caplog.text, "the first to notice")
    first.close(stopped=True)
    wait_until(lambda: rendezvous.find("worker") == "tcp://node2:9", "the address of the second")
    second.close(stopped=True)
    assert rendezvous.stopped() is not None
    RendezvousFile(path, published(fleet_id="other", epoch=3)).close(stopped=False)
    assert rendezvous.find("worker") == AT["worker"]


def test_a_broker_takes_none_that_begins_in_years_for_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_file, "LIFETIME_S", 0.2)
    path = tmp_path / "meet.json"
    own = RendezvousFile(path, published(epoch=time.time_ns() // 1_000_000))
    forged = published(epoch=(1 << 63) - 1, endpoints={"worker": "tcp://node9:9"})
    (tmp_path / "forged.json").write_bytes(forged.dump())  # `write` would share the name of its file with the broker
    (tmp_path / "forged.json").replace(path)
    wait_until(lambda: Rendezvous(str(path)).find("worker") == AT["worker"], "the broker's own addresses again")
    own.close(stopped=True)


def test_a_wildcard_is_advertised_as_a_name_that_others_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = {"worker": "tcp://0.0.0.0:5701", "learner": "ipc:///run/x"}
    assert advertised(bound, "::1") == {"worker": "tcp://[::1]:5701", "learner": "ipc:///run/x"}
    assert host_to_advertise("127.0.0.1", "") == "127.0.0.1"
    assert host_to_advertise("0.0.0.0", "localhost") == "localhost"
    with pytest.raises(ConfigError, match=r"'no\.such\.name\.invalid' cannot be resolved on this machine"):
        host_to_advertise("0.0.0.0", "no.such.name.invalid")
    monkeypatch.setattr(advertising.socket, "getfqdn", lambda: "localhost")
    assert host_to_advertise("0.0.0.0", "") != "localhost" or not advertising._address_of_network()


def test_missing_keys_or_keys_of_another_broker_raise_keys_error(tmp_path: Path) -> None:
    keys = ClientKeys("worker", b"p" * 40, b"s" * 40, b"b" * 40, tmp_path)
    check_fingerprint(keys, "worker", "", "meet.json")
    check_fingerprint(None, "worker", "", "meet.json")
    with pytest.raises(KeysError, match=r"broker\.public cannot be used: it is of another broker \(fingerprint"):
        check_fingerprint(keys, "worker", "0123456789abcdef", "meet.json")
    with pytest.raises(KeysError, match=r"copy worker\.secret and broker\.public to this machine"):
        check_fingerprint(None, "worker", "0123456789abcdef", "meet.json")


def test_a_learner_finds_its_fleet_by_path_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published().write(tmp_path / "meet.json")
    endpoint, options = find_fleet(tmp_path / "meet.json", 1.0, {})
    assert endpoint == AT["learner"]
    assert isinstance(options["rendezvous"], Rendezvous)
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, str(tmp_path / "meet.json"))
    assert find_fleet(None, 1.0, {"batch_timeout_s": 3.0})[1]["batch_timeout_s"] == 3.0
    monkeypatch.delenv(RENDEZVOUS_VARIABLE)
    with pytest.raises(ConfigError, match=f"or set {RENDEZVOUS_VARIABLE}"):
        EpisodeStream.of()
    published(state="stopped").write(tmp_path / "meet.json")
    again = r"; go on with `headrace up --resume RUN` on its machine"
    for at_goal, how in ((False, "has stopped"), (True, "reached its goal")):
        published(state="stopped", at_goal=at_goal).write(tmp_path / "meet.json")
        with pytest.raises(UnreachableError, match=rf"^fleet demo of \S+ {how}{again}$"):
            EpisodeStream.of(tmp_path / "meet.json", connect_timeout_s=0.3)

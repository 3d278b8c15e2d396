"""Ports where clients come to each worker are chosen before the workers are started."""

from __future__ import annotations

import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import zmq

from headrace.deploy.run.ports import client_endpoints, with_client_ports
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config


def config(workers: int, **serving: Any) -> FleetConfig:
    """Return the settings of a fleet that serves clients by TCP."""
    served = {"enabled": True, "host": "127.0.0.1", **serving}
    return build_config({"fleet": {"workers": workers}, "serving": served, "broker": {"allow_insecure": True}})


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def test_each_worker_has_a_unix_socket_of_its_own_and_a_port_for_http(tmp_path: Path) -> None:
    asked = build_config({"fleet": {"workers": 2}, "serving": {"enabled": True, "http_port": 0}})
    endpoints = client_endpoints(chosen := with_client_ports(asked), tmp_path)
    assert chosen.serving.port == 0
    assert [endpoints[f"clients-{slot}"] for slot in range(2)] == [f"ipc://{tmp_path}/ipc/clients-{n}" for n in (0, 1)]
    assert [endpoints[f"http-{slot}"].rpartition(":")[0] for slot in range(2)] == ["http://127.0.0.1"] * 2
    assert stat.S_IMODE((tmp_path / "ipc").stat().st_mode) == 0o700


def test_each_worker_has_ports_of_its_own_that_stay(tmp_path: Path) -> None:
    chosen = with_client_ports(config(3, http_port=0))
    endpoints = client_endpoints(chosen, tmp_path)
    assert list(endpoints) == [f"{way}-{slot}" for slot in range(3) for way in ("clients", "http")]
    assert len({port_of(endpoint) for endpoint in endpoints.values()}) == 6
    assert port_of(endpoints["clients-2"]) == port_of(endpoints["clients-0"]) + 2
    assert with_client_ports(chosen) == chosen


def test_zmq_and_http_ports_do_not_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_port: int) -> None:
    monkeypatch.setattr("headrace.deploy.run.ports.quiet_ports", lambda: [free_port])
    endpoints = client_endpoints(with_client_ports(config(2, http_port=free_port + 1)), tmp_path)
    assert not {free_port, free_port + 1} & {port_of(endpoints["clients-0"]), port_of(endpoints["clients-1"])}


def test_without_http_there_is_no_port_for_it_and_a_taken_one_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_port: int
) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        monkeypatch.setattr("headrace.deploy.run.ports.quiet_ports", lambda: [free_port])
        endpoints = client_endpoints(with_client_ports(config(1)), tmp_path)
    assert list(endpoints) == ["clients-0"]
    assert port_of(endpoints["clients-0"]) != free_port


def test_a_port_that_one_fleet_has_found_is_free_for_its_server_and_for_no_other_fleet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_port: int
) -> None:
    """Its server starts a moment later. Another fleet that starts at the same time would take the same port."""
    monkeypatch.setattr("headrace.deploy.run.ports.quiet_ports", lambda: [free_port])
    first, second = (client_endpoints(with_client_ports(config(1)), tmp_path)["clients-0"] for _ in range(2))
    assert port_of(first) == free_port != port_of(second)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind(first)


def test_a_large_fleet_holds_the_first_of_its_ports_with_few_descriptors() -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    with_client_ports(config(200))
    assert len([*Path("/proc/self/fd").iterdir()]) == before + 32


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(ConfigError, match=r"serving.host: '192.0.2.1' cannot be bound"):
        with_client_ports(config(1, host="192.0.2.1"))


def test_a_fleet_without_serving_has_no_client_ports(tmp_path: Path) -> None:
    assert client_endpoints(with_client_ports(FleetConfig()), tmp_path) == {}
    assert not (tmp_path / "ipc").exists()

"""The ports for each worker's env hosts, and the assignment of the fleet's own hosts to workers."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from headrace.deploy.annexes.doctor.check import Verdict
from headrace.deploy.annexes.doctor.examination import examine
from headrace.deploy.run.ports import env_endpoints, own_env_hosts, with_env_ports
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config
from headrace.workers.config import runner_config

BY_TCP = {"broker": {"host": "localhost", "allow_insecure": True}}


def config(workers: int, env_hosts: int = 0, num_envs: int = 8, **sampling: Any) -> FleetConfig:
    fleet = {"workers": workers, "env_hosts": env_hosts}
    """Return the settings of a fleet with remote envs that serves by TCP."""
    remote = {"env_placement": "remote", "num_envs": num_envs, **sampling}
    return build_config({"fleet": fleet, "sampling": remote, **BY_TCP})


def test_each_worker_has_a_unix_socket_of_its_own_and_no_port(tmp_path: Path) -> None:
    asked = build_config({"fleet": {"workers": 2, "env_hosts": 3}, "sampling": {"env_placement": "remote"}})
    chosen, sockets = with_env_ports(asked), f"ipc://{tmp_path}/ipc"
    assert chosen.sampling.env_hosts_port == 0
    assert env_endpoints(chosen, tmp_path) == {f"envs-{slot}": f"{sockets}/envs-{slot}" for slot in range(2)}
    assert [address for address, _ in own_env_hosts(chosen, tmp_path)] == [f"{sockets}/envs-{n}" for n in (0, 1, 0)]
    assert not [check for check in examine(chosen) if check.name.startswith("env hosts")], "doctor knows of no ports"


def test_each_worker_has_a_port_of_its_own_that_stays(tmp_path: Path) -> None:
    chosen = with_env_ports(config(3))
    ports = [int(endpoint.rpartition(":")[2]) for endpoint in env_endpoints(chosen, tmp_path).values()]
    assert list(env_endpoints(chosen, tmp_path)) == ["envs-0", "envs-1", "envs-2"]
    assert ports == [chosen.sampling.env_hosts_port + slot for slot in range(3)]
    assert with_env_ports(chosen) == chosen


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        monkeypatch.setattr("headrace.deploy.run.ports.quiet_ports", lambda: [free_port - 1, free_port])
        assert with_env_ports(config(2)).sampling.env_hosts_port not in (free_port - 1, free_port)


@pytest.mark.parametrize(
    ("broker", "worker"),
    [
        ("localhost", "127.0.0.1"),
        ("::1", "127.0.0.1"),
        ("192.0.2.1", "0.0.0.0"),
        ("0.0.0.0", "0.0.0.0"),
        ("[::]", "::"),
    ],
)
def test_a_worker_serves_env_hosts_of_other_machines_where_the_broker_serves_them(broker: str, worker: str) -> None:
    chosen = build_config({"broker": {"host": broker, "allow_insecure": True, "lease_s": 7.0}})
    runner = runner_config(chosen)
    assert (runner.env_hosts_host, runner.env_hosts_allow_insecure, runner.env_hosts_lease_s) == (worker, True, 7.0)


def test_envs_inline_have_no_ports(tmp_path: Path) -> None:
    assert env_endpoints(with_env_ports(FleetConfig()), tmp_path) == {}
    assert not (tmp_path / "ipc").exists()


def test_hosts_are_shared_out_among_workers_and_envs_among_hosts(tmp_path: Path) -> None:
    settings = {"env_hosts_port": 5800}
    first, second = "tcp://127.0.0.1:5800", "tcp://127.0.0.1:5801"
    assert list(own_env_hosts(config(2, 2, **settings), tmp_path)) == [(first, 8), (second, 8)]
    assert list(own_env_hosts(config(2, 5, **settings), tmp_path)) == [
        (first, 3),
        (second, 4),
        (first, 3),
        (second, 4),
        (first, 3),
    ]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"fleet": {"env_hosts": 2}}, "env_placement = 'remote', which is 'inline'"),
        ({"fleet": {"env_hosts": 1, "workers": 2}, "sampling": {"env_placement": "remote"}}, "take 2 or more of them"),
        ({"fleet": {"env_hosts": 1, "workers": 0}, "sampling": {"env_placement": "remote"}}, "fleet.workers = 0"),
        ({"sampling": {"env_placement": "remote", "env_hosts_port": 65535}, **BY_TCP}, "leaves no port for each"),
    ],
)
def test_clashing_settings_of_env_hosts_are_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_config(sections)


def test_doctor_checks_the_ports_of_env_hosts(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        checks = {check.name: check for check in examine(config(1, env_hosts_port=free_port))}
    assert checks["env hosts 0"].verdict is Verdict.FAIL
    assert "sampling.env_hosts_port" in checks["env hosts 0"].advice

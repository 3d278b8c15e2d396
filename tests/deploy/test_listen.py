"""`headrace up --listen HOST`: TCP with keys that it makes, and the command for workers elsewhere."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace.broker.batches.limits import BrokerState
from headrace.broker.files.state_file import Endpoints, write_broker_file
from headrace.deploy.monitoring.connecting import how_to_connect
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.key_pairs import add_key, make_keys
from headrace.deploy.run.ports import first_endpoints
from headrace.deploy.run.resume import write_settings
from headrace.schemas.credentials.keys import port_keys, read_client_keys
from headrace.schemas.errors import ExitCode
from headrace.schemas.settings.config import BrokerSection
from headrace.schemas.settings.config_loading import build_config, load_config
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.processes

SMALL = ("--num-envs", "2", "--workers", "1")
LOCAL = ("--listen", "127.0.0.1")


def headrace(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.deploy", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def lines_for_workers(said: str) -> list[str]:
    """Return the text of each line of a log that says how to start workers."""
    return re.findall(r"start workers [^\n]*?: (headrace worker [^\n]*)", said)


def test_a_worker_of_the_printed_line_delivers_with_its_part_of_the_keys_and_is_refused_without(
    tmp_path: Path,
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    (elsewhere / "keys").mkdir(mode=0o700, parents=True)
    with RunningFleet(run, *SMALL, *LOCAL) as fleet:
        fleet.wait_until(lambda: lines_for_workers(fleet.said()), "the line for workers elsewhere")
        (line,) = lines_for_workers(fleet.said())
        assert stat.S_IMODE((run / "keys").stat().st_mode) == 0o700
        bare = headrace(elsewhere, *shlex.split(line.replace(" --set keys.dir=keys", ""))[1:])
        assert bare.returncode == ExitCode.KEYS, bare.stderr
        (error,) = [one for one in bare.stderr.splitlines() if one.startswith("error: ")]
        assert "refuses peers without keys; name their folder in keys.dir" in error

        for name in ("worker.secret", "broker.public"):
            shutil.copy2(run / "keys" / name, elsewhere / "keys")
        command = [sys.executable, "-m", "headrace.deploy", *shlex.split(line)[1:]]
        with subprocess.Popen(command, cwd=elsewhere, stderr=subprocess.DEVNULL) as worker:
            try:
                fleet.wait_until(lambda: delivers_elsewhere(fleet), "a batch of the worker elsewhere")
            finally:
                worker.terminate()
        assert worker.returncode == ExitCode.OK
        fleet.terminate()
        assert fleet.finish()["balanced"] is True
    secret = (run / "keys" / "broker.secret").read_bytes()
    moved = run.rename(tmp_path / "moved")
    with RunningFleet(moved, "--until-steps", "1", up=("up", *LOCAL), place="--resume") as again:
        ended = again.finish()
    assert ended["returncode"] == 0
    assert lines_for_workers(ended["stderr"]) == [line], "workers that were started with it find the broker again"
    assert (moved / "keys" / "broker.secret").read_bytes() == secret, "the keys that workers have copies of stay"


def test_a_broker_has_the_ports_of_the_run_s_earlier_one_where_they_are_free(
    tmp_path: Path, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    here = BrokerSection(host="127.0.0.1", allow_insecure=True)
    assert first_endpoints(here, tmp_path).worker == "tcp://127.0.0.1:0"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        at = {
            "worker": f"tcp://0.0.0.0:{free_port}",
            "learner": f"tcp://0.0.0.0:{taken}",
            "weights": "ipc:///run/weights",
        }
        write_broker_file(tmp_path, "demo", Endpoints(**at), BrokerState())
        again = first_endpoints(here, tmp_path)
        fixed = first_endpoints(here.model_copy(update={"port": 5701}), tmp_path)
    assert [again.port(role) for role in at] == [free_port, 0, 0]
    assert [fixed.port(role) for role in at] == [5701, 5702, 5703]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the run's earlier ports [{taken}] are taken; ")


def delivers_elsewhere(fleet: RunningFleet) -> bool:
    snapshot = fleet.snapshot()
    return snapshot is not None and any(slot >= 1000 and row.accepted[0] for (slot, _), row in snapshot.rows.items())


def test_keys_that_the_settings_name_are_used_and_none_are_made(tmp_path: Path) -> None:
    run = ("up", *SMALL, *LOCAL, "--run-dir", "run", "--set", "keys.dir=mine", "--until-steps", "1", "--json")
    missing = headrace(tmp_path, *run)
    assert missing.returncode == ExitCode.KEYS, missing.stderr
    assert str(tmp_path / "mine") in missing.stderr
    assert not (tmp_path / "mine").exists()
    assert not (tmp_path / "run").exists()
    make_keys(tmp_path / "mine")
    found = headrace(tmp_path, *run)
    assert found.returncode == 0, found.stderr
    assert not (tmp_path / "run" / "keys").exists()
    (line,) = lines_for_workers(found.stderr)
    assert "--set keys.dir=keys" in line
    assert f"copies of worker.secret and broker.public from {tmp_path / 'mine'} in a folder keys: " in found.stderr
    loaded, _ = load_config(tmp_path / "run" / "settings.json", {})
    assert (loaded.broker.host, loaded.keys.dir) == ("127.0.0.1", str(tmp_path / "mine"))


def test_clients_elsewhere_are_told_an_address_that_they_reach(tmp_path: Path) -> None:
    serving = ("serving.host=0.0.0.0", "serving.http_port=0", "worker.advertise=127.0.0.2")
    settings = (word for setting in serving for word in ("--set", setting))
    with RunningFleet(tmp_path, *SMALL, *LOCAL, "--serve", *settings) as fleet:
        fleet.wait_until(lambda: "connect clients to " in fleet.said(), "the line for clients")
        endpoints = read_fleet_file(tmp_path / "fleet.json").endpoints
        addresses = endpoints["clients-0"], endpoints["http-0"]
        assert f"connect clients to {' or '.join(addresses)}\n" in fleet.said()
        assert [urlsplit(address).hostname for address in addresses] == ["127.0.0.2"] * 2


def test_print_config_makes_neither_keys_nor_a_run(tmp_path: Path) -> None:
    shown = headrace(tmp_path, "up", *LOCAL, "--run-dir", "run", "--print-config")
    assert shown.returncode == 0, shown.stderr
    assert f'dir = "{tmp_path / "run" / "keys"}"' in shown.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stored", "there", "more", "used"),
    [
        ("before/keys", "run/keys", (), "run/keys"),
        ("before/keys", "run/keys", LOCAL, "run/keys"),
        ("before/keys", "run/keys", ("--set", "keys.dir=mine"), "mine"),
        ("kept/keys", "kept/keys run/keys", (), "kept/keys"),
        ("before/mine", "run/keys", (), "before/mine"),
        ("before/keys", "run", (), "before/keys"),
    ],
)
def test_a_run_that_was_moved_goes_on_with_the_keys_in_it(
    tmp_path: Path, stored: str, there: str, more: tuple[str, ...], used: str
) -> None:
    for folder in there.split():
        (tmp_path / folder).mkdir(parents=True)
    settings = {"broker": {"host": "127.0.0.1"}, "keys": {"dir": str(tmp_path / stored)}}
    (tmp_path / "run" / "settings.json").write_text(json.dumps(settings))
    shown = headrace(tmp_path, "up", "--resume", "run", *more, "--print-config")
    assert shown.returncode == 0, shown.stderr
    assert f'dir = "{tmp_path / used}"' in shown.stdout


@pytest.mark.parametrize("named", ["", "/mine"])
def test_a_resumed_run_is_opened_to_other_machines_with_new_keys_or_its_own(tmp_path: Path, named: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "settings.json").write_bytes(write_settings(build_config({"keys": {"dir": named}})))
    shown = headrace(tmp_path, "up", *LOCAL, "--resume", "run", "--print-config")
    assert shown.returncode == 0, shown.stderr
    assert f'dir = "{named or run / "keys"}"' in shown.stdout


def test_the_line_names_the_key_of_the_group_and_the_port_for_env_hosts_where_there_is_one(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    add_key(tmp_path / "keys", "worker", "gpu")
    settings = {
        "keys": {"dir": str(tmp_path / "keys"), "group": "gpu"},
        "broker": {"host": "0.0.0.0"},
        "sampling": {"env_placement": "remote", "env_hosts_port": 5800},
        "fleet": {"workers": 0},
    }
    at = {"worker": "tcp://10.0.0.1:5701", "learner": "tcp://10.0.0.1:5702"}
    said, _ = how_to_connect(build_config(settings), at, tmp_path, "demo", {})
    assert "copies of worker.gpu.secret, broker.public and env-host.public" in said
    words = shlex.split(said.partition("headrace worker ")[2])
    sets = [word.partition("=")[::2] for flag, word in pairwise(words) if flag == "--set"]
    given: dict[str, dict[str, object]] = {}
    for key, value in sets:
        section, _, name = key.partition(".")
        given.setdefault(section, {})[name] = int(value) if value.isdecimal() else value
    assert build_config(given).env_hosts_host == "0.0.0.0", "the worker takes its settings, and serves env hosts by TCP"


def test_each_line_names_the_key_files_that_suffice_for_it(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    add_key(tmp_path / "keys", "worker", "gpu")
    settings: dict[str, Any] = {"keys": {"dir": str(tmp_path / "keys"), "group": "gpu"}, "broker": {"host": "0.0.0.0"}}
    at = {"worker": "tcp://10.0.0.1:5701", "learner": "tcp://10.0.0.1:5702"}

    def lines(**more: Any) -> list[tuple[Path, str]]:
        """Return each line, with a folder that has the files which the line names."""
        found = []
        for said in how_to_connect(build_config({**settings, **more}), at, tmp_path / "run", "demo", {}):
            files, _, command = said.partition(f" from {tmp_path / 'keys'} in a folder keys: ")
            (folder := tmp_path / secrets.token_hex(4)).mkdir()
            for name in re.findall(r"[\w.-]+\.(?:secret|public|token)", files):
                shutil.copy2(tmp_path / "keys" / name, folder)
            found.append((folder, command))
        return found

    (worker, _), (host, command) = lines(sampling={"env_placement": "remote"}, fleet={"workers": 0})
    place = tmp_path / "run" / "rendezvous.json"
    assert command == f"headrace env-host --rendezvous {place} --env CartPole-v1 --set keys.dir=keys"
    keys, shown = port_keys(str(worker), "env-host", "gpu"), read_client_keys(host, "env-host", "")
    assert keys is not None
    assert keys.judge("envs", shown.public)[1] == ""
    assert shown.broker == read_client_keys(worker, "worker", "gpu").public
    ((worker, _),) = lines(serving={"enabled": True, "http_port": 8000}, fleet={"workers": 0})
    assert port_keys(str(worker), "client", "gpu") is not None
    assert sorted(path.name for path in worker.iterdir()) == [
        *("broker.public", "client.public", "http.token", "worker.gpu.secret")
    ]

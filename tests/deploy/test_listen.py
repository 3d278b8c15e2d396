"""`headrace up --listen HOST`: TCP with keys that it makes, and the command for workers elsewhere."""

from __future__ import annotations

import re
import shlex
import shutil
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import orjson
import pytest

from headrace.deploy.monitoring.connecting import how_to_connect
from headrace.deploy.run.key_pairs import add_key, make_keys
from headrace.schemas.errors import ExitCode
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
    with RunningFleet(run, "--until-steps", "1", up=("up", *LOCAL), place="--resume") as again:
        assert again.finish()["returncode"] == 0
    assert (run / "keys" / "broker.secret").read_bytes() == secret, "the keys that workers have copies of stay"


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


def test_print_config_makes_neither_keys_nor_a_run(tmp_path: Path) -> None:
    shown = headrace(tmp_path, "up", *LOCAL, "--run-dir", "run", "--print-config")
    assert shown.returncode == 0, shown.stderr
    assert f'dir = "{tmp_path / "run" / "keys"}"' in shown.stdout
    assert list(tmp_path.iterdir()) == []


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
    (said,) = [line for line in how_to_connect(build_config(settings), at, tmp_path, "demo", {}) if "worker " in line]
    assert "copies of worker.gpu.secret and broker.public" in said
    words = shlex.split(said.partition("headrace worker ")[2])
    sets = [word.partition("=")[::2] for flag, word in pairwise(words) if flag == "--set"]
    given: dict[str, dict[str, object]] = {}
    for key, value in sets:
        section, _, name = key.partition(".")
        given.setdefault(section, {})[name] = int(value) if value.isdecimal() else value
    assert build_config(given).env_hosts_host == "0.0.0.0", "the worker takes its settings, and serves env hosts by TCP"


def earlier_settings(run: Path, **changes: object) -> None:
    """Give both settings files of a run the form of an earlier version: broker.transport, and ports on loopback."""
    for name in ("settings.json", "config.json"):
        tree = orjson.loads((run / name).read_bytes())
        tree["broker"].update({"transport": "tcp", "host": "127.0.0.1", "port": 5701})
        tree["serving"].update({"host": "127.0.0.1", "port": 0})
        for key, value in changes.items():
            section, _, field = key.partition("__")
            tree[section][field] = value
        (run / name).write_bytes(orjson.dumps(tree))


def test_a_run_of_an_earlier_version_goes_on_by_unix_sockets(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunningFleet(run, *SMALL, "--until-steps", "200") as first:
        assert first.finish()["returncode"] == 0
    earlier_settings(run)
    shutil.rmtree(run / "ipc")
    page = orjson.loads((run / "broker.json").read_bytes())
    page["endpoints"] = {role: f"tcp://127.0.0.1:{5701 + n}" for n, role in enumerate(("worker", "learner", "weights"))}
    (run / "broker.json").write_bytes(orjson.dumps(page))
    (run / "token").write_text("an earlier version's\n")
    with RunningFleet(run, "--until-steps", "200", place="--resume") as again:
        result = again.finish()
    assert (result["returncode"], result["balanced"]) == (0, True), result["stderr"]
    assert result["env_steps"] >= 400, "it goes on with the books of before"
    assert again.endpoint("worker") == f"ipc://{run}/ipc/worker"


@pytest.mark.parametrize(
    ("changes", "host", "port"),
    [
        ({"keys__dir": "/keys"}, "127.0.0.1", 5701),
        ({"broker__allow_insecure": True}, "127.0.0.1", 5701),
        ({"broker__advertise": "tunnel.example", "sampling__env_hosts_port": 5800}, "", 0),
        ({"broker__transport": "ipc", "broker__port": 0, "keys__dir": "/keys"}, "", 0),
    ],
    ids=["keys", "insecure", "advertised", "ipc with keys"],
)
def test_settings_of_an_earlier_run_keep_tcp_with_keys_or_without_and_no_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object], host: str, port: int
) -> None:
    for name in ("settings.json", "config.json"):
        (tmp_path / name).write_bytes(orjson.dumps(build_config({}).model_dump(mode="json")))
    earlier_settings(tmp_path, **changes)
    for name in ("settings.json", "config.json"):
        loaded, _ = load_config(tmp_path / name, {})
        assert (loaded.broker.host, loaded.broker.port) == (host, port)
        assert loaded.keys.dir == changes.get("keys__dir", "")
    assert "have no effect" not in caplog.text

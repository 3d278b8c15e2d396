"""The script in deploy/ssh starts, shows and drains workers on hosts, by a real sshd."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from documentation.blocks import Page

from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.redis_view import FleetView
from support.ports import free_port
from support.waiting import TIMEOUT_S, wait_until

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "ssh" / "headrace-ssh"
HEADRACE = str(Path(sys.executable).with_name("headrace"))
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path(SSHD).exists() or os.geteuid() != 0, reason="needs Debian's openssh-server, and root"),
]


class Hosts:
    """Two hosts, by the names "one" and "two": ports of one sshd, with a folder each in place of a home."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.homes = {name: folder / name for name in ("one", "two")}
        ports = {name: free_port() for name in self.homes}
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        lines = [
            *(f"ListenAddress 127.0.0.1:{port}" for port in ports.values()),
            f"HostKey {folder}/host_key",
            f"AuthorizedKeysFile {folder}/user_key.pub",
            *("UsePAM no", "StrictModes no", "PidFile none", "PermitRootLogin yes"),
        ]
        for name, home in self.homes.items():
            home.mkdir()
            lines += [f"Match LocalPort {ports[name]}", f'    ForceCommand cd {home} && eval "$SSH_ORIGINAL_COMMAND"']
        (folder / "sshd_config").write_text("\n".join(lines) + "\n")
        client = [f"IdentityFile {folder}/user_key", "StrictHostKeyChecking no", "UserKnownHostsFile /dev/null"]
        client += ["LogLevel ERROR", "HostName 127.0.0.1"]
        hosts = [f"Host {name}\n    Port {port}" for name, port in {**ports, "gone": free_port()}.items()]
        (folder / "ssh_config").write_text("\n".join([*client, *hosts]) + "\n")
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with (folder / "sshd.log").open("wb") as log:
            command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
            self.sshd = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: "listening on" in (folder / "sshd.log").read_text(), "sshd to listen")

    def script(self, verb: str, hosts: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "hosts.txt").write_text(hosts)
        return self.run(" ".join(["headrace-ssh", verb, "hosts.txt", *arguments]), **variables)

    def run(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder that has hosts.txt, fleet.toml and keys/."""
        environment = {
            **os.environ,
            "PATH": f"{SCRIPT.parent}:{Path(HEADRACE).parent}:{os.environ['PATH']}",
            "SSH": f"ssh -F {self.folder}/ssh_config -o BatchMode=yes",
            "HEADRACE": HEADRACE,
            **variables,
        }
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )

    def place(self, name: str) -> Path:
        """Return the folder of the workers of a host."""
        return self.homes[name] / "headrace-workers" / os.uname().nodename

    def close(self) -> None:
        for name in self.homes:
            self._kill(self.place(name))
        self.sshd.terminate()
        self.sshd.wait()

    def _kill(self, place: Path) -> None:
        """Kill what a failed test has left, which still holds the lock."""
        if place.exists() and subprocess.run(["flock", "-n", place / "lock", "true"], check=False).returncode:
            os.kill(int((place / "pid").read_text()), signal.SIGKILL)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.close()


@pytest.mark.thorough
@pytest.mark.slow
def test_workers_on_two_hosts_are_started_shown_and_drained_by_the_commands_of_the_page(
    hosts: Hosts, root: Path
) -> None:
    page, run = Page(root / "docs" / "guides" / "deploy" / "ssh.md"), hosts.folder / "run"
    made = hosts.run(page.line("headrace keys init"))
    assert made.returncode == 0, made.stderr
    at = f'host = "127.0.0.1"\nport = {free_port()}'
    settings = ["[fleet]", 'fleet_id = "demo"', "[sampling]", "num_envs = 4", "[broker]", at]
    (hosts.folder / "fleet.toml").write_text("\n".join(settings) + "\n")
    config = ["--config", str(hosts.folder / "fleet.toml"), "--set", f"keys.dir={hosts.folder / 'keys'}"]
    up = [HEADRACE, "up", "--workers", "0", "--run-dir", str(run), *config]
    with (hosts.folder / "up.log").open("wb") as log:
        fleet = subprocess.Popen(up, stdout=log, stderr=log)
    try:
        wait_until(lambda: (run / "rendezvous.json").exists() or fleet.poll() is not None, "the fleet to serve")
        (hosts.folder / "hosts.txt").write_text("one 2 # comment\n\ntwo")
        start = page.line("headrace-ssh start ").replace("broker.example", "localhost")
        started = hosts.run(start)
        assert started.returncode == 0, started.stdout + started.stderr
        assert sorted(line.split(":")[0] for line in started.stdout.splitlines()) == ["one", "two"], started.stdout
        for name in ("worker.secret", "supervisor.secret"):
            mode = stat.S_IMODE((hosts.place("one") / "keys" / name).stat().st_mode)
            assert mode == 0o600
        redis_url = read_fleet_file(run / "fleet.json").redis_url
        fleet_id = read_fleet_file(run / "fleet.json").fleet_id
        with closing(FleetView(redis_url, fleet_id)) as view:
            wait_until(lambda: len(view.read().workers) == 3, "three workers", pause_s=0.5)
            steps = view.read().totals.get("env_steps_total", 0)
            wait_until(lambda: view.read().totals.get("env_steps_total", 0) > steps, "steps", pause_s=0.5)

        again = hosts.run(start)
        assert again.returncode == 1
        assert "one: runs already, as process" in again.stdout
        stopped = hosts.script("stop", "one")
        assert stopped.returncode == 0, stopped.stdout
        (hosts.folder / "hosts.txt").write_text("one\ntwo\ngone")
        shown = hosts.run(page.line("headrace-ssh status "))
        assert shown.returncode == 1
        lines = {line.split(":")[0]: line for line in shown.stdout.splitlines()}
        assert "does not run" in lines["one"]
        assert "two: runs, as process" in lines["two"]
        assert "refused" in lines["gone"]
        (hosts.folder / "hosts.txt").write_text("one\ntwo")
        assert hosts.run(page.line("headrace-ssh stop ")).returncode == 0
    finally:
        fleet.terminate()
        assert fleet.wait(200.0) == 0, (hosts.folder / "up.log").read_text()[-3000:]
    audit = [HEADRACE, "audit", "--strict", "--run-dir", str(run)]
    checked = subprocess.run(audit, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@contextmanager
def fleet_in(folder: Path, command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A fleet that is started in a folder, by a user whose home it is; it must end in order."""
    with (folder / "up.log").open("wb") as log:
        own = {**os.environ, "HOME": str(folder), "PATH": f"{Path(HEADRACE).parent}:{os.environ['PATH']}"}
        fleet = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=own, stdout=log, stderr=log)
    try:
        yield fleet
    finally:
        fleet.terminate()
        assert fleet.wait(200.0) == 0, (folder / "up.log").read_text()[-3000:]


def await_steps(run: Path, number: int) -> None:
    """Wait until the fleet has taken so many env steps more than now."""
    file = run / "fleet.json"
    wait_until(lambda: file.exists() and read_fleet_file(file).state == "running", "the fleet to run", pause_s=0.3)
    page = read_fleet_file(file)
    with closing(FleetView(page.redis_url, page.fleet_id)) as view:
        wait_until(lambda: view.read().totals, "a first report", pause_s=0.5)
        goal = view.read().totals.get("env_steps_total", 0) + number
        wait_until(lambda: view.read().totals.get("env_steps_total", 0) >= goal, f"{goal} steps", pause_s=0.5)


@pytest.mark.thorough
@pytest.mark.slow
def test_workers_get_another_key_and_follow_a_fleet_that_moves_by_the_commands_of_the_page(
    hosts: Hosts, root: Path
) -> None:
    page = Page(root / "docs" / "guides" / "deploy" / "ssh.md")
    assert hosts.run(page.line("headrace keys init")).returncode == 0
    at = f'host = "127.0.0.1"\nport = {free_port()}'
    settings = ["[fleet]", 'fleet_id = "demo"', "[sampling]", "num_envs = 4", "[keys]", 'dir = "keys"', "[broker]"]
    (hosts.folder / "fleet.toml").write_text("\n".join([*settings, at]) + "\n")
    (hosts.folder / "hosts.txt").write_text("one")
    start = page.line("headrace-ssh start ")
    with fleet_in(hosts.folder, page.line("headrace up --run-dir ")) as fleet:
        started = hosts.run(start.replace("broker.example", "localhost"))
        assert started.returncode == 0, started.stdout + started.stderr
        await_steps(hosts.folder / "runs" / "demo", 1_000)
        secret = hosts.place("one") / "keys" / "worker.secret"
        before = secret.read_text()
        changed = hosts.run("set -e\n" + page.block_with("headrace keys revoke").replace("broker.example", "localhost"))
        assert changed.returncode == 0, changed.stdout + changed.stderr
        assert secret.read_text() != before
        await_steps(hosts.folder / "runs" / "demo", 1_000)
        fleet.terminate()
        fleet.wait(200.0)
    copied = hosts.run(page.line("tar -c ").replace("ssh NEW", "$SSH two"))
    assert copied.returncode == 0, copied.stderr
    (hosts.folder / "runs").rename(hosts.folder / "left")
    run = hosts.homes["two"] / "runs" / "demo"
    with fleet_in(hosts.homes["two"], page.line("headrace up --resume ")):
        await_steps(run, 1_000)
        stopped = hosts.run(page.line("headrace-ssh stop "))
        assert stopped.returncode == 0, stopped.stdout
    audit = [HEADRACE, "audit", "--strict", "--run-dir", str(run)]
    checked = subprocess.run(audit, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_workers_that_fail_at_start_are_reported_with_their_error(hosts: Hosts) -> None:
    (hosts.folder / "fleet.toml").write_text("[sampling]\nnum_env = 4\n")
    told = hosts.script("start", "one", "fleet.toml", KEYS="", HEADRACE=HEADRACE)
    if "one: ended at once:" not in told.stdout:  # a busy machine takes longer than the script waits
        wait_until(lambda: "num_envs" in hosts.script("status", "one").stdout, "the workers' last words", pause_s=0.5)
        told = hosts.script("status", "one")
        assert "does not run" in told.stdout
    assert told.returncode == 1
    assert "num_envs" in told.stdout, "the error names the nearest setting"


@pytest.mark.parametrize(
    ("listed", "said"), [("one two 3", "HOST [COUNT]"), ("one 0", "HOST [COUNT]"), ("# none", "names no host")]
)
def test_a_wrong_list_of_hosts_starts_no_worker(hosts: Hosts, listed: str, said: str) -> None:
    (hosts.folder / "fleet.toml").touch()
    told = hosts.script("start", f"two\n{listed}\n" if "none" not in listed else listed, "fleet.toml", KEYS="")
    assert told.returncode == 2
    assert said in told.stderr
    assert list(hosts.homes["two"].iterdir()) == []


def test_missing_keys_are_named_before_a_host_is_touched(hosts: Hosts) -> None:
    (hosts.folder / "fleet.toml").touch()
    told = hosts.script("start", "one", "fleet.toml")
    assert told.returncode == 2
    assert "keys/worker.secret cannot be read; headrace keys init" in told.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    told = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout
    remote = tmp_path / "remote.sh"
    remote.write_text("#!/bin/sh\n" + SCRIPT.read_text().split("REMOTE='\n")[1].split("\nesac'")[0] + "\nesac\n")
    told = subprocess.run(["shellcheck", str(remote)], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout

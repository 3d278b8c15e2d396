"""A real systemd runs the shipped units on two machines, installed and started by the commands of their page."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from documentation.blocks import Page

from support.fleets.machines import Machines
from support.fleets.two_machines import NoNamespacesError
from support.systemd_machine import SystemdMachine, what_is_missing
from support.waiting import wait_until

pytestmark = [pytest.mark.systemd, pytest.mark.netns, pytest.mark.slow, pytest.mark.processes]
if reason := what_is_missing():
    pytestmark.append(pytest.mark.skip(reason=reason))

FLEET, WORKERS = "headrace-fleet@demo", "headrace-workers@demo"
OF_NO_FLEET = "headrace-env-host@lent headrace-serve@policy"
OTHERS = f"headrace-exporter@demo {OF_NO_FLEET}"
RUN = "/var/lib/headrace/demo/run"
SCRAPE = """
import urllib.request
token = open("/etc/headrace/keys/http.token").read().strip()
asked = urllib.request.Request("http://127.0.0.1:9747/metrics", headers={"Authorization": f"Bearer {token}"})
print(urllib.request.urlopen(asked, timeout=60).read().decode())
"""
EATER = """
import pathlib, sys
pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
b"x" * (2 << 30)
"""


@pytest.fixture
def page(root: Path) -> Page:
    return Page(root / "docs" / "guides" / "deploy" / "systemd.md")


@contextmanager
def booted(tmp_path: Path, root: Path, *names: str) -> Iterator[list[SystemdMachine]]:
    """Machines of these names, running. All resolve the names of all, and broker.example as the first one."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Machines(*names))
        except NoNamespacesError as error:
            pytest.skip(str(error))
        hosts = {name: network.address(name) for name in names} | {"broker.example": network.address(names[0])}
        machines = (SystemdMachine(name, network, hosts, tmp_path / name, root) for name in names)
        yield [stack.enter_context(machine) for machine in machines]


def install_units(machine: SystemdMachine, page: Page) -> None:
    for start in ("useradd ", "cp -r ", "systemctl daemon-reload"):
        machine.run(page.line(start))


def install(machine: SystemdMachine, page: Page, settings: str) -> Path:
    """Install the units, and return the folder of their settings."""
    install_units(machine, page)
    folder = machine.etc / "headrace"
    folder.mkdir(mode=0o755)
    (folder / "demo.toml").write_text(settings)
    return folder


def copy_keys(line: str, fleet: SystemdMachine, workers: SystemdMachine) -> None:
    """Copy the files that this line of `scp` copies; they belong to root there."""
    [names] = re.findall(r"\{(.*)\}", line)
    (workers.etc / "headrace" / "keys").mkdir(mode=0o700, exist_ok=True)
    for name in names.split(","):
        shutil.copy(fleet.etc / "headrace" / "keys" / name, workers.etc / "headrace" / "keys")


def steps(fleet: SystemdMachine) -> int:
    """Return the env steps that `systemctl status` shows."""
    found = re.search(r"env steps ([\d,]+)", fleet.shows(FLEET, "StatusText"))
    return int(found[1].replace(",", "")) if found else 0


def wait_for_steps(fleet: SystemdMachine, number: int) -> None:
    wait_until(lambda: steps(fleet) >= number, f"{number} steps; {fleet.shows(FLEET, 'StatusText')}", pause_s=0.3)


def is_told(machine: SystemdMachine, unit: str, text: str) -> bool:
    return text in machine.run(f"journalctl --unit={unit} --no-pager")


def memory_group(machine: SystemdMachine, unit: str) -> str:
    """Return the control group that limits the unit's memory, quoted: its name has backslashes."""
    own = machine.shows(unit, "ControlGroup")
    return machine.run(f"ls -d --quoting-style=shell-always /sys/fs/cgroup{{/memory,}}'{own}' 2>&-", check=False)


def check_confinement(machine: SystemdMachine, unit: str) -> None:
    """The service runs as its user without rights, and sees and writes what the unit says, and nothing else."""
    pid, user = machine.main_pid(unit), machine.run("id -u headrace")
    status = dict(line.split(":\t", 1) for line in machine.run(f"cat /proc/{pid}/status").splitlines() if ":\t" in line)
    assert set(status["Uid"].split()) == {user}
    assert (int(status["CapBnd"], 16), status["NoNewPrivs"], status["Seccomp"]) == (0, "1", "2")
    machine.run("touch /root/secret /home/secret /tmp/secret /etc/written /var/lib/written")
    inside = f"nsenter --target={pid} --mount "
    assert machine.run(f"{inside} find /root /home /tmp -name secret") == ""
    for folder in ("/etc", "/opt/headrace", "/var/lib", "/usr"):
        assert "Read-only file system" in machine.run(f"{inside} touch {folder}/written 2>&1", check=False), folder
    machine.run(f"{inside} touch /var/lib/headrace/demo/written && rm /var/lib/headrace/demo/written")
    as_user = f"{inside} setpriv --reuid=headrace --regid=headrace --clear-groups"
    pids = machine.run(f"{as_user} ls /proc").split()
    assert str(pid) in pids
    assert "1" not in pids, "processes of other users are hidden"


def check_credentials(machine: SystemdMachine) -> None:
    """The service alone reads its copies of keys; the files themselves belong to root."""
    copies = f"/run/credentials/{WORKERS}.service"
    assert machine.run(f"stat -c '%U %a' {copies}/worker.secret") in ("headrace 400", "root 440")
    for user, path in (("nobody", copies), ("headrace", "/etc/headrace/keys")):
        as_user = f"setpriv --reuid={user} --clear-groups cat {path}/worker.secret 2>&1"
        assert "Permission denied" in machine.run(as_user, check=False)


def check_memory_limit(machine: SystemdMachine, unit: str) -> None:
    """The kernel holds the unit's memory limit, and the service goes on after a kill."""
    group = memory_group(machine, unit)
    limit = machine.run(f"cat {group}/memory.limit_in_bytes {group}/memory.max 2>&-", check=False)
    assert limit == machine.shows(unit, "MemoryMax")
    pid = machine.main_pid(unit)
    machine.run(f"systemctl set-property --runtime {unit} MemoryMax=1G")
    (machine.etc / "eater.py").write_text(EATER)
    assert machine.run(f"python3 /etc/eater.py {group}; echo $?", check=False).endswith("137")
    assert machine.main_pid(unit) == pid
    machine.run(f"systemctl set-property --runtime {unit} MemoryMax={limit}")


def change_keys(fleet: SystemdMachine, workers: SystemdMachine, page: Page) -> None:
    """Give the workers keys of a group of their own, as the page's drop-in names them, and revoke those of before."""
    for role in ("worker", "supervisor"):
        fleet.run(page.line(f"headrace keys add {role} "))
    fleet.run(page.line("chown -R headrace:"))
    copy_keys(page.line("scp -p .*gpu"), fleet, workers)
    drop_in = page.block("ini")
    (workers.etc / "systemd" / "system" / f"{WORKERS}.service.d" / "group.conf").write_text(drop_in)
    before = incarnations(fleet)
    workers.run(f"{page.line('systemctl daemon-reload')} && {page.line('systemctl restart ')}")
    wait_until(lambda: incarnations(fleet) != before, "a worker of the new group", pause_s=0.5)
    fleet.run(page.line("headrace keys revoke "))


def incarnations(fleet: SystemdMachine) -> dict[str, int]:
    known: dict[str, int] = json.loads(fleet.run(f"cat {RUN}/broker.json"))["incarnations"]
    return known


def give_settings(fleet: SystemdMachine, workers: SystemdMachine, page: Page) -> None:
    """Install the units, the page's settings, and its keys; then what the other units need."""
    settings = page.block("toml") + "[sampling]\nnum_envs = 4\n[dashboard]\nenabled = false\n"
    mine, theirs = (install(machine, page, settings) for machine in (fleet, workers))
    fleet.run(page.line("headrace keys init"))
    copy_keys(page.line("scp -p .*worker.secret"), fleet, workers)
    (theirs / "demo.env").write_text(page.block("text").replace("WORKERS=16", "WORKERS=1"))
    drop_in = workers.etc / "systemd" / "system" / f"{WORKERS}.service.d"
    drop_in.mkdir()
    (drop_in / "sooner.conf").write_text("[Service]\nWatchdogSec=10\n")
    # No worker is at its address, and it must not end for that while it is started with the others.
    (mine / "lent.toml").write_text("[sampling]\nnum_envs = 1\n[worker]\nconnect_timeout_s = 900\n")
    (mine / "lent.env").write_text("CONNECT=tcp://127.0.0.1:5800\n")
    (mine / "policy.env").write_text(f"CHECKPOINT={RUN}\n")


def check_others(fleet: SystemdMachine) -> None:
    """The other units become ready, give signs of life, and end in order."""
    fleet.run(
        "umask 077; python3 -c 'import json, sys; print(json.load(sys.stdin)[\"redis_url\"])' "
        f"< {RUN}/fleet.json > /etc/headrace/keys/redis-reader.url"
    )
    fleet.run(f"systemctl start {OTHERS}")
    assert "env_steps" in fleet.run(f"python3 -c '{SCRAPE}'")
    assert fleet.shows(OTHERS, "SubState").split() == ["running"] * len(OTHERS.split())
    fleet.run(f"systemctl stop {OTHERS}")
    assert fleet.shows(OTHERS, "Result").split() == ["success"] * len(OTHERS.split())


@pytest.mark.thorough
def test_systemd_starts_confines_watches_restarts_and_drains_a_fleet(tmp_path: Path, root: Path, page: Page) -> None:
    with booted(tmp_path, root, "fleet", "workers") as (fleet, workers):
        watch_and_drain(fleet, workers, page)


@pytest.mark.thorough
def test_a_fleet_of_systemd_moves_to_another_machine_by_the_commands_of_the_page(
    tmp_path: Path, root: Path, page: Page
) -> None:
    with booted(tmp_path, root, "fleet", "workers", "second") as (fleet, workers, second):
        give_settings(fleet, workers, page)
        fleet.run(page.line("chown -R headrace:"))
        fleet.run(page.line(f"systemctl enable --now {FLEET}"))
        workers.run(page.line(f"systemctl enable --now {WORKERS}").replace("enable", "enable --no-block"))
        wait_for_steps(fleet, 3_000)

        fleet.run(page.line(f"systemctl disable --now {FLEET}"))
        taken = steps(fleet)
        pack, unpack = page.line("tar -C / -c ").split(" | ssh NEW ")
        fleet.run(f"{pack} > /etc/moved.tar")
        shutil.move(fleet.etc / "moved.tar", second.etc)
        install_units(second, page)
        second.run(f"{unpack} < /etc/moved.tar")
        second.run(page.line(f"systemctl enable --now {FLEET}"))
        hosts = workers.etc / "hosts"
        addresses = dict(line.split()[::-1] for line in hosts.read_text().splitlines())
        hosts.write_text(f"127.0.0.1 localhost\n{addresses['second']} broker.example\n")
        wait_for_steps(second, taken + 5_000)

        workers.run(page.line("systemctl stop "))
        second.run(page.line("systemctl stop "))
        second.run(page.line("headrace audit "))


def watch_and_drain(fleet: SystemdMachine, workers: SystemdMachine, page: Page) -> None:
    """Start a fleet as the page says, break what the units watch, restart it, change its keys, and drain it."""
    give_settings(fleet, workers, page)
    workers.run(page.line(f"systemctl enable --now {WORKERS}").replace("enable", "enable --no-block"))
    fleet.run(page.line("headrace doctor --config [^-]*$"))
    fleet.run(page.line("chown -R headrace:"))
    fleet.run(page.line(f"systemctl enable --now {FLEET}"))
    assert fleet.shows(FLEET, "SubState") == "running", "`enable` returned when it was ready"
    workers.run(page.line("headrace doctor .* --rendezvous"))
    wait_for_steps(fleet, 5_000)
    check_confinement(fleet, FLEET)
    check_confinement(workers, WORKERS)
    check_credentials(workers)
    check_memory_limit(workers, WORKERS)

    workers.run(f"systemctl kill --kill-whom=main --signal=STOP {WORKERS}")
    fleet.run(f"systemctl kill --kill-whom=main --signal=KILL {FLEET}")
    fleet.run(f"systemctl --no-block start {OF_NO_FLEET}")  # for the time until both are back
    wait_until(lambda: is_told(workers, WORKERS, "Failed with result 'watchdog'"), "the watchdog", pause_s=0.5)
    wait_until(lambda: fleet.shows(FLEET, "NRestarts") != "0", "another start of the fleet", pause_s=0.5)
    wait_until(lambda: workers.shows(WORKERS, "NRestarts") != "0", "another start of the workers", pause_s=0.5)
    for machine, unit in ((fleet, FLEET), (workers, WORKERS)):
        machine.run(f"systemctl start {unit}")  # returns when it is ready
    wait_for_steps(fleet, steps(fleet) + 10_000)

    for machine, unit in ((workers, WORKERS), (fleet, FLEET)):  # as for an upgrade
        machine.run(page.line("systemctl stop "))
        machine.run(page.line(f"systemctl start {unit} "))
    wait_for_steps(fleet, steps(fleet) + 5_000)
    change_keys(fleet, workers, page)
    wait_for_steps(fleet, steps(fleet) + 5_000)

    workers.run(page.line("systemctl stop "))
    check_others(fleet)
    fleet.run(page.line("systemctl stop "))
    for machine, unit in ((workers, WORKERS), (fleet, FLEET)):
        ended = [machine.shows(unit, name) for name in ("ActiveState", "Result", "ExecMainStatus")]
        assert ended == ["inactive", "success", "0"], unit
    fleet.run(page.line("headrace audit "))

"""`headrace doctor`: the limits, addresses and versions that it finds, and its advice."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.annexes.doctor.cgroup import Limit, Limits, read_limits
from headrace.deploy.annexes.doctor.check import Verdict
from headrace.deploy.annexes.doctor.examination import key_checks
from headrace.deploy.annexes.doctor.limits import (
    Needs,
    core_check,
    limit_checks,
    memory_check,
    task_check,
)
from headrace.deploy.annexes.doctor.network import (
    advertised_check,
    advertised_checks,
    meeting_checks,
    reachability_check,
)
from headrace.deploy.run.key_pairs import make_keys
from headrace.deploy.run.redis_view import Snapshot, crowded_learner
from headrace.schemas.credentials.key_files import read_public_key
from headrace.schemas.peers.rendezvous import Port, Published
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import build_config
from support.waiting import TIMEOUT_S, wait_until

HEADRACE = [sys.executable, "-m", "headrace.deploy"]
MIB = 1 << 20
FLEET = Needs.of_role(FleetConfig(), "fleet")


def doctor(*arguments: str, before: Callable[[], None] | None = None) -> dict[str, dict[str, str]]:
    """Run the command; `before` runs in its process first. Return its checks by name."""
    command = [*HEADRACE, "doctor", "--json", *arguments]
    told = subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT_S, preexec_fn=before)
    return {check["name"]: check for check in orjson.loads(told.stdout)["checks"]}


# Control groups.

LOOK = """
import orjson
from headrace.deploy.annexes.doctor.cgroup import read_limits
from headrace.deploy.annexes.doctor.limits import Needs, limit_checks
from headrace.schemas.settings.config import FleetConfig
print(orjson.dumps(list(limit_checks(Needs.of_role(FleetConfig(), "fleet"), read_limits()))).decode())
"""


def proc_of(folder: Path, groups: str, mounts: str) -> Path:
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text(mounts)
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_limit_above_a_group_of_cgroup_v2_holds(tmp_path: Path) -> None:
    mount = tmp_path / "fs"
    write(mount / "a.slice/b.service/memory.max", f"{800 * MIB}\n")
    write(mount / "memory.max", "max\n")
    write(mount / "a.slice/memory.max", f"{512 * MIB}\n")
    write(mount / "a.slice/b.service/cpu.max", "150000 100000\n")
    write(mount / "a.slice/cpu.max", "max 100000\n")
    write(mount / "a.slice/b.service/pids.max", "64\n")
    mounts = f"25 20 0:22 / {mount} rw,nosuid - cgroup2 cgroup2 rw\n"
    limits = read_limits(proc_of(tmp_path, "0::/a.slice/b.service\n", mounts))
    assert limits == Limits(
        memory=Limit(512 * MIB, str(mount / "a.slice/memory.max")),
        cpus=Limit(1.5, str(mount / "a.slice/b.service/cpu.max")),
        tasks=Limit(64, str(mount / "a.slice/b.service/pids.max")),
    )


def test_limits_of_cgroup_v1_are_read_from_the_hierarchy_of_each_controller(tmp_path: Path) -> None:
    memory, cpu = tmp_path / "memory", tmp_path / "cpu"
    write(memory / "job/memory.limit_in_bytes", f"{256 * MIB}\n")
    write(memory / "memory.limit_in_bytes", "9223372036854771712\n")
    write(cpu / "cpu.cfs_quota_us", "50000\n")
    write(cpu / "cpu.cfs_period_us", "100000\n")
    mounts = (
        f"30 25 0:26 / {memory} rw - cgroup cgroup rw,memory\n31 25 0:27 /docker/x {cpu} rw - cgroup cgroup rw,cpu\n"
    )
    limits = read_limits(proc_of(tmp_path, "4:memory:/job\n1:cpu,cpuacct:/docker/x\n0::/\n", mounts))
    assert limits.memory == Limit(256 * MIB, str(memory / "job/memory.limit_in_bytes"))
    assert limits.cpus == Limit(0.5, str(cpu / "cpu.cfs_quota_us")), "a container's group is at the mount itself"
    assert limits.tasks is None


def test_malformed_cgroup_files_count_as_no_limit(tmp_path: Path) -> None:
    write(tmp_path / "fs/memory.max", "-5 bytes\n")
    write(tmp_path / "fs/cpu.max", "1 2 3\n")
    mounts = f"garbage\n25 20 0:22 / {tmp_path / 'fs'} rw - cgroup2 cgroup2 rw\n"
    assert read_limits(proc_of(tmp_path, "0::/../../x\nnonsense\n", mounts)) == Limits()
    assert read_limits(tmp_path / "no-such-process") == Limits()


@pytest.fixture
def group() -> Iterator[Callable[[str, str, int], None]]:
    """Give a function that makes a control group with a limit. Processes of this thread's children enter it."""
    made: list[Path] = []

    def limit(controller: str, name: str, value: int) -> None:
        folder = Path("/sys/fs/cgroup") / controller / f"headrace-test-{os.getpid()}"
        try:
            folder.mkdir()
            made.append(folder)
            (folder / name).write_text(str(value))
        except OSError as error:
            pytest.skip(f"no control groups of v1 can be made here: {error}")

    limit.made = made  # type: ignore[attr-defined]
    yield limit
    for folder in made:
        folder.rmdir()


@pytest.mark.processes
def test_real_limits_of_a_control_group_are_named(group: Any) -> None:
    group("memory", "memory.limit_in_bytes", 700 * MIB)
    group("pids", "pids.max", 40)
    entries = [folder / "cgroup.procs" for folder in group.made]

    def enter() -> None:
        for entry in entries:
            entry.write_text(str(os.getpid()))

    told = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, check=True, timeout=TIMEOUT_S, preexec_fn=enter
    )
    checks = {check["name"]: check for check in orjson.loads(told.stdout)}
    assert checks["memory"]["verdict"] == "fail"
    assert f"700 MiB by {entries[0].with_name('memory.limit_in_bytes')}" in checks["memory"]["seen"]
    assert checks["processes"]["verdict"] == "warn"
    assert "40 by" in checks["processes"]["seen"]


# The needs of settings, against limits.


def test_memory_is_compared_with_and_without_full_buffers() -> None:
    least, most = FLEET.least_memory, FLEET.least_memory + FLEET.buffers
    verdicts = [memory_check(FLEET, Limit(size, "x")).verdict for size in (least - 1, least, most - 1, most)]
    assert verdicts == [Verdict.FAIL, Verdict.WARN, Verdict.WARN, Verdict.OK]
    assert "broker.max_held_bytes" in memory_check(FLEET, Limit(least, "x")).advice


def test_threads_are_compared_with_the_share_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    needs = Needs.of_role(build_config({"fleet": {"workers": 4}, "sampling": {"torch_threads": 2}}), "fleet")
    assert core_check(needs, None).verdict is Verdict.OK
    limited = core_check(needs, Limit(1.5, "/sys/fs/cgroup/cpu.max"))
    assert limited.verdict is Verdict.WARN
    assert limited.seen == "1.5 by /sys/fs/cgroup/cpu.max, 9 torch threads of 4 workers and a learner"


def test_tasks_are_compared_with_the_group_and_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert task_check(FLEET, Limit(20, "x")).verdict is Verdict.WARN
    assert task_check(FLEET, Limit(500, "x")).verdict is Verdict.OK
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (30, 30))
    assert "30 by ulimit -u" in task_check(FLEET, Limit(500, "x")).seen


def test_a_worker_needs_less_than_a_fleet() -> None:
    limits = Limits(memory=Limit(FLEET.least_memory - 1, "x"))
    assert {check.name: check.verdict for check in limit_checks(FLEET, limits)}["memory"] is Verdict.FAIL
    worker = Needs.of_role(FleetConfig(), "worker")
    assert {check.name: check.verdict for check in limit_checks(worker, limits)}["memory"] is Verdict.OK


@pytest.mark.processes
def test_doctor_sees_ulimits(tmp_path: Path) -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    checks = doctor("--run-dir", str(tmp_path), before=lower)
    assert checks["open files"]["verdict"] == "warn"
    assert checks["open files"]["advice"] == "ulimit -n 544"


HUGE = f"={1 << 50}"


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "warning"),
    [
        (("up", "--env", "no_such.module:env", "--set", f"broker.max_held_bytes{HUGE}"), "memory: .* lower broker"),
        (
            ("worker", "--set", f"broker.max_held_bytes{HUGE}"),
            "memory: .* with full buffers; lower broker.max_held_bytes",
        ),
        (
            ("broker", "--run-dir", "run", "--set", f"broker.max_held_bytes{HUGE}"),
            "memory: .* for a broker, .* lower broker.max_held_bytes",
        ),
        (("learner", "--set", "learner.torch_threads=1000"), "cores: .* 1000 torch threads of a learner; "),
        (("env-host", "--num-envs", "65536"), "memory: .* 16384 processes of envs; raise the limit, or start fewer"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_start_warns_of_limits_that_do_not_suffice(
    tmp_path: Path, free_port: int, command: tuple[str, ...], warning: str
) -> None:
    silent = f"tcp://127.0.0.1:{free_port}"
    place = {"env-host": ("--connect", silent), "worker": ("--endpoint", silent), "learner": ("--endpoint", silent)}
    named = ("--fleet-id", "x") if command[0] in ("worker", "learner") else ()
    said = tmp_path / "said"
    with said.open("wb") as words:
        arguments = [*HEADRACE, *command, *place.get(command[0], ()), *named]
        started = subprocess.Popen(arguments, cwd=tmp_path, stdout=words, stderr=words)
    try:
        wait_until(lambda: re.search(warning, said.read_text()) or started.poll() is not None, "a warning")
    finally:
        started.terminate()
        started.wait(TIMEOUT_S)
    assert re.search(warning, said.read_text()), said.read_text()


# Addresses.


def test_a_broker_that_answers_is_reachable_and_others_are_not(free_port: int) -> None:
    refused = reachability_check("broker", f"tcp://127.0.0.1:{free_port}")
    assert refused.verdict is Verdict.FAIL
    assert "start the broker" in refused.advice
    with socket.create_server(("127.0.0.1", free_port)):
        answers = reachability_check("broker", f"tcp://127.0.0.1:{free_port}")
    assert answers.verdict is Verdict.OK
    assert "our address there is 127.0.0.1" in answers.seen
    unknown = reachability_check("broker", "tcp://no-such-host.invalid:5701")
    assert unknown.verdict is Verdict.FAIL
    assert "resolves" in unknown.advice


def test_an_advertised_name_that_others_cannot_use_is_named() -> None:
    assert advertised_check("broker", "127.0.0.1", "", "broker.advertise").verdict is Verdict.OK
    loopback = advertised_check("broker", "0.0.0.0", "localhost", "broker.advertise")
    assert loopback.verdict is Verdict.FAIL
    assert "connect to themselves: set broker.advertise" in loopback.advice
    assert advertised_check("broker", "[::]", "192.0.2.7", "broker.advertise").seen == "192.0.2.7"
    for bound, advertise in (("0.0.0.0", "no-such-host.invalid"), ("no-such-host.invalid", "")):
        assert "does not resolve" in advertised_check("broker", bound, advertise, "broker.advertise").seen


def test_the_address_for_env_hosts_is_checked_by_the_name_that_workers_advertise() -> None:
    config = FleetConfig.model_validate(
        {
            "sampling": {"env_placement": "remote"},
            "broker": {"host": "0.0.0.0", "allow_insecure": True},
            "worker": {"advertise": "192.0.2.7"},
        }
    )
    (check,) = [one for one in advertised_checks(config) if one.name == "envs' address"]
    assert (check.verdict, check.seen) == (Verdict.OK, "192.0.2.7")


def test_a_rendezvous_is_checked_with_its_addresses_and_the_key_of_its_broker(tmp_path: Path, free_port: int) -> None:
    keys, others, place = tmp_path / "keys", tmp_path / "others", tmp_path / "rendezvous.json"
    make_keys(keys)
    make_keys(others)
    config = build_config({"keys": {"dir": str(keys)}})
    (missing,) = meeting_checks(config, str(place))
    assert missing.verdict is Verdict.FAIL
    endpoints = dict.fromkeys(("worker", "weights"), f"tcp://127.0.0.1:{free_port}")
    key = {"broker": read_public_key(keys / "broker.public").fingerprint}
    Published(fleet_id="demo", endpoints=endpoints, keys=key).write(place)
    with socket.create_server(("127.0.0.1", free_port)):
        checks = list(meeting_checks(config, str(place)))
        assert [check.verdict for check in checks] == [Verdict.OK] * 4
        strange = list(meeting_checks(build_config({"keys": {"dir": str(others)}}), str(place)))[-1]
    assert (strange.name, strange.verdict) == ("broker key", Verdict.FAIL)
    gone = [check.verdict for check in meeting_checks(config, str(place))]
    assert gone == [Verdict.OK, Verdict.FAIL, Verdict.FAIL, Verdict.OK]
    assert [check.name for check in meeting_checks(config, str(place), "learner")] == ["rendezvous"], "names no learner"
    (wrong,) = meeting_checks(config, "dns://broker.example")
    assert "broker.port" in wrong.seen, "a name needs ports"


def test_an_env_host_is_told_whether_it_reaches_the_ports_of_workers(tmp_path: Path, free_port: int) -> None:
    keys, place = tmp_path / "keys", tmp_path / "rendezvous.json"
    make_keys(keys)
    config = build_config({"keys": {"dir": str(keys)}})
    ours = read_public_key(keys / "worker.public").fingerprint
    port = Port(address=f"tcp://127.0.0.1:{free_port}", key=ours)
    ports = {"envs-3": port, "envs-4": Port(address=port.address, key="another"), "clients-3": port}
    Published(fleet_id="demo", endpoints={}, ports=ports).write(place)
    *_, closed = meeting_checks(config, str(place), "env-host")
    assert (closed.name, closed.verdict) == ("worker, envs-3", Verdict.FAIL)
    assert closed.advice == "start the worker, or correct the port"
    with socket.create_server(("127.0.0.1", free_port)):
        assert [check.verdict for check in meeting_checks(config, str(place), "env-host")] == [Verdict.OK] * 2
    Published(fleet_id="demo", endpoints={}).write(place)
    *_, none = meeting_checks(config, str(place), "env-host")
    assert (none.name, none.verdict) == ("workers", Verdict.WARN)
    assert none.advice == "start workers with sampling.env_placement = remote"


# Keys and the learner.


def test_a_folder_of_keys_to_which_others_may_add_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    config = build_config({"keys": {"dir": str(folder)}})
    assert [check.verdict for check in key_checks(config)] == [Verdict.OK]
    folder.chmod(0o777)
    (check,) = key_checks(config)
    assert check.verdict is Verdict.WARN
    assert check.advice == f"chmod 700 {folder}"
    (folder / "http.token").chmod(0o644)
    (check,) = key_checks(config)
    assert check.verdict is Verdict.FAIL
    assert "chmod 600" in check.seen


def test_doctor_names_a_learner_whose_torch_takes_the_cores_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = {0: {"host": "box"}, 1: {"host": "box"}, 2: {"host": "other"}}
    lease = {"connected": 1.0, "host": "box", "torch_threads": 8.0, "cores": 4.0}
    told = crowded_learner(Snapshot(lease=lease, workers=workers))
    assert told is not None
    assert told[0] == "torch uses 8 threads in the learner, which shares 4 cores with 2 workers: both get slower"
    for other in ({"torch_threads": 2.0}, {"connected": 0.0}, {"host": "elsewhere"}, {"host": ""}, {"cores": 0.0}):
        assert crowded_learner(Snapshot(lease={**lease, **other}, workers=workers)) is None, other
    for threads, verdict in (("64", "warn"), ("1", "ok")):  # MKL takes no more than there are cores
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.setenv(name, threads)
        asked = doctor("--set", "fleet.workers=64", "--set", "learner.enabled=false")["learner"]
        assert (asked["verdict"], bool(asked["advice"])) == (verdict, verdict == "warn"), asked
    assert "learner" not in doctor()

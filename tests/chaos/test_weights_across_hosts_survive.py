"""Workers on another machine go on with new weights, and never with half of a version, after kills amid a pull."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from support.fleets.machines import Machines
from support.fleets.two_machines import NoNamespacesError
from support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.netns, pytest.mark.chaos, pytest.mark.thorough]

BITS_PER_S = 40_000_000
"""A pull of 8 MB takes 1.7 s."""
WORKERS = ("--num-envs", "2", "--set", 'module.config={"hidden": [1000, 1000]}', "--set", "broker.lease_s=4")
FLEET = ("--fleet-id", "hosts")

LEARNER = """
import sys
from headrace.learner_stub import EpisodeStream, WeightPublisher
from headrace.workers.modules import actor_critic
with EpisodeStream(sys.argv[1]) as stream, WeightPublisher(sys.argv[1]) as weights:
    module, slots = actor_critic(stream.spaces(), hidden=(1000, 1000)), set()
    newest = weights.publish(module.state_dict())
    for batch in stream:
        if batch.steps and int(batch.columns["weights_seq"].max()) == newest:
            slots.add(batch.slot)
        if len(slots) >= 2:
            print(newest, flush=True)
            newest, slots = weights.publish(module.state_dict()), set()
"""
"""Publish a version, wait until two workers sample with it, print its number, and so on."""


@pytest.fixture
def machines() -> Iterator[Machines]:
    with ExitStack() as stack:
        try:
            yield stack.enter_context(Machines("head", "host"))
        except NoNamespacesError as error:
            pytest.skip(str(error))


TELLING = """
import sys, torch
from headrace.learner_stub import EpisodeStream, WeightPublisher
size = int(sys.argv[2]) // 16 // 4
with EpisodeStream(sys.argv[1]) as stream, WeightPublisher(sys.argv[1]) as weights:
    def publish():
        number = 1_000 * weights.epoch + weights.seq + 1
        return weights.publish({f"w{n}": torch.full((size,), float(number)) for n in range(16)})
    newest, slots = publish(), set()
    for batch in stream:
        if batch.steps:
            seqs, low, high = (batch.columns[name] for name in ("weights_seq", "low", "high"))
            label = 1_000 * batch.learner_epoch + seqs
            if (low != label).any() or (high != label).any():
                print(f"torn: {label.tolist()} {low.tolist()} {high.tolist()}", flush=True)
            if batch.learner_epoch == weights.epoch and int(seqs.max()) == newest:
                slots.add(batch.slot)
        if len(slots) >= 2:
            print(newest, flush=True)
            newest, slots = publish(), set()
"""
"""The same with a number of its own in all tensors of a version; the policy's columns and the labels must tell it."""
TRAVELLING_BYTES, TRAVELLING_BITS_PER_S = 64 << 20, 250_000_000
"""A version is on its way for 2.2 s."""


class Started:
    """Processes on the machines, each of which has memory of its own for files."""

    def __init__(self, machines: Machines, folder: Path, stack: ExitStack) -> None:
        self._machines, self._folder, self._stack = machines, folder, stack

    def start(self, machine: str, name: str, *command: str) -> subprocess.Popen[bytes]:
        self.memory(machine).mkdir(exist_ok=True)
        mounted = ("sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(self.memory(machine)))
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(
                self._machines.command(machine, *mounted, sys.executable, *command), stdout=log, stderr=log
            )
        self._stack.callback(process.wait, TIMEOUT_S)
        self._stack.callback(process.terminate)
        return process

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def memory(self, machine: str) -> Path:
        return self._folder / f"memory-{machine}"

    def versions(self) -> int:
        """Return with how many versions two workers have sampled."""
        return sum(line.isdigit() for line in self.told())

    def told(self) -> list[str]:
        """Return the lines of all learners."""
        return [line for log in self._folder.glob("learner*.log") for line in log.read_text().splitlines()]

    def arriving(self) -> list[Path]:
        """Return the files of versions that come over the link at this moment."""
        return [path for path in self.memory("host").rglob(".*-*.*") if path.stat().st_blocks * 512 > 2_000_000]


def test_workers_take_new_weights_after_the_pulling_one_is_killed(machines: Machines, tmp_path: Path) -> None:
    run_dir, where = tmp_path / "run", (f"broker.host={machines.address('head')}", "broker.allow_insecure=true")
    machines.limit("host", BITS_PER_S)
    with ExitStack() as stack:
        started = Started(machines, tmp_path, stack)
        sets = [part for setting in where for part in ("--set", setting)]
        started.start("head", "broker", "-m", "headrace.deploy", "broker", *FLEET, "--run-dir", str(run_dir), *sets)
        wait_until((run_dir / "broker.json").exists, "the broker's start")
        endpoints = orjson.loads((run_dir / "broker.json").read_bytes())["endpoints"]
        join = ("-m", "headrace.deploy", "worker", *FLEET, "--endpoint", endpoints["worker"], "--count", "3", *WORKERS)
        started.start("host", "workers", *join, "--run-dir", str(tmp_path / "workers"))
        started.start("head", "learner", "-c", LEARNER, endpoints["learner"])
        wait_until(lambda: started.versions() >= 2, "two versions at the workers")
        for _ in range(2):
            (half,) = wait_until(started.arriving, "a pull")
            before = started.versions()
            os.kill(int(half.name.rpartition(".")[2]), signal.SIGKILL)
            wait_until(lambda n=before: started.versions() >= n + 2, "newer weights")  # type: ignore[misc]
            assert not half.exists()


def test_no_version_is_used_half_when_any_role_is_killed_while_it_travels(machines: Machines, tmp_path: Path) -> None:
    """Each step's label is the number that all tensors held when the step was chosen."""
    run_dir, where = tmp_path / "run", (f"broker.host={machines.address('head')}", "broker.allow_insecure=true")
    machines.limit("host", TRAVELLING_BITS_PER_S)
    module = ("module.build=support.pipeline.telling_module:Telling", f'module.config={{"nbytes": {TRAVELLING_BYTES}}}')
    with ExitStack() as stack:
        started = Started(machines, tmp_path, stack)
        broker = ("-m", "headrace.deploy", "broker", *FLEET, "--run-dir", str(run_dir), *_sets(*where))
        roles = {"broker": started.start("head", "broker-0", *broker)}
        wait_until((run_dir / "broker.json").exists, "the broker's start")
        endpoints = orjson.loads((run_dir / "broker.json").read_bytes())["endpoints"]
        join = ("-m", "headrace.deploy", "worker", *FLEET, "--endpoint", endpoints["worker"], "--count", "3")
        sets = _sets(*module, "broker.lease_s=4")
        workers = started.start(
            "host", "workers", *join, "--num-envs", "2", *sets, "--run-dir", str(tmp_path / "workers")
        )
        learner = ("-c", TELLING, endpoints["learner"], str(TRAVELLING_BYTES))
        roles["learner"] = started.start("head", "learner-0", *learner)
        wait_until(lambda: started.versions() >= 2, "two versions at the workers")
        for number, role in enumerate(("worker", "puller", "learner", "broker"), 1):
            (half,) = wait_until(started.arriving, "a pull")
            before, pulling = started.versions(), int(half.name.rpartition(".")[2])
            if role in roles:
                os.kill(roles[role].pid, signal.SIGKILL)
                command = broker if role == "broker" else learner
                roles[role] = started.start("head", f"{role}-{number}", *command)
            else:
                others = [pid for pid in _descendants(workers.pid) if pid != pulling and _shares_weights(pid)]
                os.kill(pulling if role == "puller" else others[0], signal.SIGKILL)
            wait_until(lambda n=before: started.versions() >= n + 2, f"newer weights after the {role}'s end")  # type: ignore[misc]
        assert [line for line in started.told() if line.startswith("torn")] == []


def _sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def _descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(below for child in children for below in _descendants(child))]


def _shares_weights(pid: int) -> bool:
    """Return whether a process takes part in a folder of weights."""
    return any(link.resolve().name == "users" for link in Path(f"/proc/{pid}/fd").iterdir())

"""Real fleets that stand still for each reason there is: `headrace why` names it, and only it, in both of its ways.

A finding goes once its reason is gone. Where its command can end the stall, the test runs that command.
"""

from __future__ import annotations

import itertools
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Set
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.deploy.monitoring.facts import FactsReader
from headrace.deploy.monitoring.findings import find, verdict
from headrace.deploy.report.audit import find_books
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.chunks.batch import BatchHeader
from headrace.schemas.errors import ExitCode
from headrace.schemas.frames.wire import MessageKind, encode
from headrace.schemas.messages import Bye, Heartbeat, WorkerHello, WorkerWelcome, read
from support.fleets import slow_training
from support.fleets.running_fleet import RunningFleet, redis_in
from support.fleets.told_learner import told_learner
from support.pipeline.delivery import LoopThread, RawPeer
from support.waiting import TIMEOUT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

_LOOK_S = 0.5

Found = Set[tuple[str, str]]
"""(kind, whom) of each finding."""


def sets(*assignments: str) -> tuple[str, ...]:
    return tuple(word for assignment in assignments for word in ("--set", assignment))


class Stalls:
    """The findings of `why` on a fleet, by its run directory and by its Redis."""

    def __init__(self, fleet: RunningFleet) -> None:
        self.fleet, run = fleet, fleet.run_dir
        fleet.wait_until(lambda: (run / "fleet.json").exists() and fleet.snapshot(), "a fleet in Redis")
        self._url, self.fleet_id = find_books(run)
        self._here = FactsReader(run)
        self._elsewhere = FactsReader(redis_url=self._url, fleet_id=self.fleet_id)
        self._before: Found = set()

    def close(self) -> None:
        self._here.close()
        self._elsewhere.close()

    def until_healthy(self) -> None:
        """Wait for a fleet that learns and has no finding."""
        self.fleet.wait_until(lambda: self.fleet.steps() > 0, "first steps")
        wait_until(lambda: not any(self._both()), "no finding", pause_s=_LOOK_S)
        self._before = set()

    def until(self, *expected: tuple[str, str], between: Found = frozenset()) -> dict[str, dict[str, Any]]:
        """Wait until both ways find `expected`, and until then only that, `between`, and what was expected before.

        Return the findings of `headrace why --run-dir --json` by kind.
        """
        wanted = set(expected)

        def met() -> bool:
            here, elsewhere = self._both()
            assert here | elsewhere <= wanted | self._before | between, (here, elsewhere)
            return here == elsewhere == wanted

        try:
            wait_until(met, f"{expected}", pause_s=_LOOK_S)
        except AssertionError as error:
            said = self.fleet.said()[-2000:]
            raise AssertionError(f"{error}; now: {self._both()}; the fleet said:\n{said}") from error
        self._before = wanted
        told = [self._why("--run-dir", str(self.fleet.run_dir))]
        told += [self._why("--redis-url", self._url, "--fleet-id", self.fleet_id)]
        for findings in told:
            assert {(one["kind"], one["whom"]) for one in findings} == wanted
        assert [one["limit"] for one in told[0]] == [one["limit"] for one in told[1]]
        return {one["kind"]: one for one in told[0]}

    def _both(self) -> tuple[Found, Found]:
        here, elsewhere = ({(one.kind, one.whom) for one in find(it.read())} for it in (self._here, self._elsewhere))
        return here, elsewhere

    def _why(self, *where: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "headrace.deploy", "why", *where, "--json"]
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        findings: list[dict[str, Any]] = orjson.loads(told.stdout)["findings"]
        assert told.returncode == (ExitCode.FINDINGS if findings else 0), told.stderr
        return findings


def until_joined(fleet: RunningFleet, workers: int) -> None:
    """Wait until the broker knows so many workers. On a busy machine that takes longer than `why` is patient."""

    def met() -> bool:
        snapshot = fleet.snapshot()
        return snapshot is not None and len(snapshot.workers) == workers

    fleet.wait_until(met, f"{workers} workers to join")


def since(finding: dict[str, Any], least_s: float) -> bool:
    """Return whether a finding has lasted for so long, and no longer than a stage of its test."""
    return bool(least_s <= time.time() - finding["since_unix_s"] < TIMEOUT_S)


def run_here(command: str) -> str:
    """Run a recommended command that ends by itself, and return what it prints."""
    return subprocess.run(shlex.split(command), capture_output=True, text=True, check=True).stdout


@contextmanager
def stalls_of(run: Path, *arguments: str, timeout_s: float = 600.0) -> Iterator[Stalls]:
    with RunningFleet(run, *arguments, "--timeout-s", str(timeout_s)) as fleet, closing(Stalls(fleet)) as stalls:
        yield stalls


@contextmanager
def running(command: str) -> Iterator[None]:
    """Run a command that a finding recommends, until the end of the block."""
    program, *arguments = shlex.split(command)
    assert program == "headrace"
    with subprocess.Popen([sys.executable, "-m", "headrace.deploy", *arguments], stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def test_a_learner_that_is_gone_slow_or_commits_nothing_and_a_full_window(tmp_path: Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    env = ("--env", "support.envs.fleet:slow_second_worker", "--workers", "2", "--num-envs", "1", "--no-check-env")
    own = sets("learner.enabled=false", "worker.window_batches=4", f'sampling.env_config={{"fast": "{fast}"}}')
    with stalls_of(run, *env, *own) as stalls:
        started = stalls.until(("no_learner", "learner"))["no_learner"]
        assert started["command"] == f'EpisodeStream.of("{run}")'
        with told_learner(run) as learner:
            found = stalls.until(("no_weights", "learner"))["no_weights"]
            assert since(found, 60)
            assert found["limit"] == "worker.random_actions_before_weights = false"
            learner.tell("publish")
            found = stalls.until(("window_full", "worker-0"))["window_full"]
            assert since(found, 10)
            assert found["limit"] == "worker.window_batches = 4"
            assert "4 batches of it are not committed" in found["sentence"]
            fast.touch()
            assert since(stalls.until(("learner_slow", "learner"))["learner_slow"], 10)
            assert since(stalls.until(("no_commits", "learner"))["no_commits"], 60)
            learner.tell("take")
            learner.tell("commit")  # a stream whose batches all wait for a commit gives no further one
            learner.tell("train")  # it commits again and again, so no finding comes while the commands look
            stalls.until()
        slow = frozenset((("learner_slow", "learner"),))  # before its end is reported: it takes nothing any more
        found = stalls.until(("no_learner", "learner"), between=slow)["no_learner"]
        assert since(found, 10)
        assert found["command"] == "", "its arguments are not known"
        assert f"the learner python -m support.fleets.told_learner (pid {learner.process.pid} on " in found["sentence"]
        with told_learner(run) as learner:
            learner.tell("train")
            stalls.until()


class WrongCounts(LoopThread):
    """A worker from elsewhere that tries to bring a batch whose counts do not add up, again and again."""

    slot = 0

    def __init__(self, endpoint: str, fleet_id: str) -> None:
        super().__init__("wrong counts")
        self._endpoint, self._fleet_id = endpoint, fleet_id

    def _run(self) -> None:
        with RawPeer(self._endpoint) as peer:
            peer.send(WorkerHello(fleet_id=self._fleet_id, token="wrong").frames())
            place = read(WorkerWelcome, peer.receive_kind(MessageKind.WELCOME).header)
            self.slot, who = place.slot, {"slot": place.slot, "incarnation": place.incarnation}
            totals = WorkerTotals(seq=1, stepped=1 << 21, shipped=1 << 20, shipped_chunks=1)
            header = BatchHeader(fleet_id=self._fleet_id, **who, seq=1, steps=1 << 20, chunks=1, totals=totals)
            while not self.stopping.wait(_LOOK_S):
                peer.send(Heartbeat(**who, totals=WorkerTotals()).frames())
                peer.send(encode(MessageKind.BATCH, header.model_dump()))
            peer.send(Bye(**who, totals=WorkerTotals(), settled=Settled(), reason="shutdown").frames())
            peer.receive_kind(MessageKind.ACK)


def test_a_worker_without_credit_a_batch_refused_again_and_again_and_a_redis_that_is_away(tmp_path: Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    env = ("--env", "support.envs.fleet:slow_second_worker", "--workers", "2", "--num-envs", "1", "--no-check-env")
    own = sets(
        "learner.enabled=false",
        "broker.max_held_batches=4",
        "worker.window_batches=16",
        f'sampling.env_config={{"fast": "{fast}"}}',
    )
    with (
        redis_in(tmp_path / "elsewhere") as (url, server),
        stalls_of(run, *env, *own, *sets(f"redis.url={url}", "broker.lease_s=60")) as stalls,
        told_learner(run) as learner,
    ):
        learner.tell("publish")
        # A busy machine takes longer to start the learner than `why` is patient.
        found = stalls.until(("no_credit", "worker-0"), between={("no_learner", "learner")})["no_credit"]
        assert since(found, 10)
        assert found["limit"] == "broker.max_held_batches = 4"
        assert re.search(r"the broker holds [34] of at most 4 batches$", found["sentence"])
        fast.touch()
        learner.tell("train")
        stalls.until()

        server.send_signal(signal.SIGSTOP)
        stopped_at = time.time()
        found = stalls.until(("redis_away", "Redis"))["redis_away"]
        assert found["sentence"].startswith("waiting for Redis at redis://:***@")
        assert found["since_unix_s"] == pytest.approx(stopped_at, abs=5.0)  # of a program that started later
        server.send_signal(signal.SIGCONT)
        stalls.until()

        with WrongCounts(stalls.fleet.endpoint("worker"), stalls.fleet_id) as wrong:
            found = stalls.until(("batches_refused", "broker"))["batches_refused"]
        assert re.search(rf"[\d,]+ of worker {wrong.slot} .*\(implausible batch\)$", found["sentence"])
        assert f"{1 << 21} steps, of which {1 << 20} are open" in run_here(found["command"])
        stalls.until()


def test_envs_that_fail_again_and_again_and_one_that_cannot_be_built_again(tmp_path: Path) -> None:
    env = ("--env", "support.envs.fleet:failing_or_gone", "--workers", "2", "--num-envs", "2", "--no-check-env")
    hangs = sets('sampling.env_config={"hangs": true}', "sampling.env_placement=process", "sampling.envs_per_process=1")
    with stalls_of(tmp_path, *env, *hangs, *sets("sampling.env_reset_timeout_s=300")) as stalls:
        until_joined(stalls.fleet, 2)  # worker 1 may be the first by so much that its env is down the sooner
        found = stalls.until(("envs_failing", "worker-0"), ("envs_down", "worker-1"))
        assert found["envs_failing"]["limit"] == "sampling.env_restart_attempts = 8 failures of one env in a row"
        assert "RuntimeError: the simulator diverged" in found["envs_failing"]["sentence"]
        assert since(found["envs_failing"], 20)
        for one in found.values():
            program, *arguments = shlex.split(one["command"])
            assert (program, arguments[0]) == ("headrace", "rerun")
            command = [sys.executable, "-m", "headrace.deploy", *arguments]
            rerun = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
            # The env counts its steps over all its episodes, so it may not fail when one of them is repeated alone.
            assert re.search(r"RuntimeError: .*\n(.*\n)*(failed again|did not fail)", rerun.stdout), rerun.stderr
        assert since(found["envs_down"], 20)
        assert found["envs_down"]["sentence"].startswith("1 of 2 envs of worker-1 are down; the newest failure")
        assert "RuntimeError: the simulator diverged" in found["envs_down"]["sentence"]


def test_all_env_hosts_are_gone(tmp_path: Path) -> None:
    env = ("--env", "CartPole-v1", "--workers", "1", "--num-envs", "2")
    remote = sets("sampling.env_placement=remote", "broker.lease_s=4")
    with stalls_of(tmp_path, *env, *remote) as stalls:
        until_joined(stalls.fleet, 1)
        found = stalls.until(("no_env_hosts", "worker-0"))["no_env_hosts"]
        for _ in range(2):
            assert since(found, 10)
            assert found["limit"] == 'sampling.env_placement = "remote"'
            with running(found["command"]):
                stalls.until(between={("envs_silent", "worker-0")})  # while the host builds the envs
                stalls.until_healthy()
            gone = {("envs_silent", "worker-0")}  # until the lease of the host ends
            found = stalls.until(("no_env_hosts", "worker-0"), between=gone)["no_env_hosts"]
            assert "no env host serves its envs" in found["sentence"]


def test_clients_are_idle(tmp_path: Path) -> None:
    arguments = ("--env", "CartPole-v1", "--workers", "1", "--num-envs", "2", "--serve")
    with stalls_of(tmp_path, *arguments, *sets("serving.lease_s=600")) as stalls:
        found = stalls.until(("no_clients", "clients"))["no_clients"]
        assert since(found, 30)
        assert (found["sentence"], found["limit"]) == ("waiting for clients", "serving.enabled = true")
        address = found["command"].split(" or ")[0]
        program = [sys.executable, "-m", "headrace.deploy.clients.cartpole", address, "1"]
        with subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
            try:
                stalls.until()
                client.send_signal(signal.SIGSTOP)
                found = stalls.until(("no_clients", "clients"))["no_clients"]
                assert found["sentence"] == "waiting for clients; of 1 connected, none takes steps"
                client.send_signal(signal.SIGCONT)
                stalls.until()
            finally:
                client.kill()


def test_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160m", "none", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount: {mounted.stderr.strip()}")
    try:
        with stalls_of(disk / "run", "--env", "CartPole-v1", "--workers", "1", "--num-envs", "2") as stalls:
            stalls.until_healthy()
            filler = disk / "filler"
            filler.write_bytes(bytes(shutil.disk_usage(disk).free - (32 << 20)))
            found = stalls.until(("disk_full", "disk"))["disk_full"]
            assert found["limit"] == f'fleet.run_dir = "{disk / "run"}"'
            assert str(disk) in run_here(found["command"])
            filler.unlink()
            stalls.until()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_broker_without_descriptors_for_a_worker_that_joins(tmp_path: Path) -> None:
    """The workers that have joined go on meanwhile, and `headrace up` says it too."""
    with stalls_of(tmp_path, "--env", "CartPole-v1", "--workers", "1", "--num-envs", "2") as stalls:
        stalls.until_healthy()
        broker = stalls.fleet.pid("broker")
        assert broker is not None
        in_use = {int(path.name) for path in Path(f"/proc/{broker}/fd").iterdir()}
        free = next(number for number in itertools.count() if number not in in_use)
        before = resource.prlimit(broker, resource.RLIMIT_NOFILE)
        resource.prlimit(broker, resource.RLIMIT_NOFILE, (free, before[1]))
        found = stalls.until(("joins_blocked", "broker"))["joins_blocked"]
        assert "can open no more files and sockets" in found["sentence"]
        wait_until(
            lambda: "broker no peer can join: this process can open no more" in stalls.fleet.said(), "it said so"
        )
        steps = stalls.fleet.steps()
        stalls.fleet.wait_until(lambda: stalls.fleet.steps() > steps, "the worker goes on")
        resource.prlimit(broker, resource.RLIMIT_NOFILE, before)
        stalls.until()


SLOW_ENVS = ("--env", "support.envs.fleet:paced", *sets("sampling.env_placement=process"))
SLOW_LEARNER = (
    *("--env", "CartPole-v1"),
    *sets("module.build=support.fleets.slow_training:build", "learner.epochs=3", "learner.minibatch_size=512"),
)
"""It trains for a second, and workers have sampled what it wants much sooner. So they seem to wait at each look."""


@pytest.mark.parametrize(
    ("slow", "run_s"),
    [pytest.param(SLOW_ENVS, 300.0, id="envs are slow"), pytest.param(SLOW_LEARNER, 120.0, id="the learner is slow")],
)
def test_nothing_is_found_in_minutes_of_normal_training(
    tmp_path: Path, slow: tuple[str, ...], run_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readers look twice a second, from the start to the end: at the run directory, and at Redis alone.

    A worker that takes long to start is found, and nothing else. A run without a goal but its time ends in order.
    """
    monkeypatch.setenv(slow_training.MARK, str(tmp_path / "training"))
    run = tmp_path / "run"
    with ExitStack() as stack:
        url, _ = stack.enter_context(redis_in(tmp_path / "elsewhere"))
        settings = sets("learner.steps_per_update=512", f"redis.url={url}")
        arguments = (*slow, "--workers", "2", "--num-envs", "2", *settings, "--timeout-s", str(run_s))
        fleet = stack.enter_context(RunningFleet(run, *arguments))
        fleet.wait_until(lambda: (run / "fleet.json").exists() and fleet.snapshot(), "a fleet in Redis")
        _, fleet_id = find_books(run)
        places = (("--run-dir", str(run)), ("--redis-url", url, "--fleet-id", fleet_id))
        watches = [Watch(run), Watch(redis_url=url, fleet_id=fleet_id)]
        until_joined(fleet, 2)
        joined_at = time.time()
        result = fleet.finish(run_s + TIMEOUT_S)
        for watch in watches:
            watch.join(TIMEOUT_S)
        afterwards = [stack.enter_context(why(*where)).communicate(timeout=TIMEOUT_S)[0] for where in places]
    assert (result["returncode"], result["goal_reached"]) == (ExitCode.OK, True), result["stderr"]
    assert re.search(r"\d s are over \(.*\); draining", result["stderr"])
    assert result["weights_seq"] > 20
    for watch, after in zip(watches, afterwards, strict=True):
        for unix_s, kinds, _ in watch.looks:
            assert kinds <= ({"worker_not_joined"} if unix_s <= joined_at + _LOOK_S else set())
        verdicts = [line for *_, line in watch.looks]
        assert any(verdict.startswith("Learning. ") for verdict in verdicts)
        assert verdicts[-1].startswith("Ended. "), verdicts[-1]
        assert orjson.loads(after)["verdict"].startswith("Ended. "), after


class Watch(threading.Thread):
    """Looks at a fleet until it has ended."""

    def __init__(self, *run: Path, **elsewhere: str) -> None:
        super().__init__(daemon=True)
        self._reader = FactsReader(*run, **elsewhere)
        self.looks: list[tuple[float, set[str], str]] = []
        """(unix s, kinds of findings, verdict) of each look."""
        self.start()

    def run(self) -> None:
        with self._reader as reader:
            while not self.looks or not self.looks[-1][2].startswith("Ended"):
                facts = reader.read()
                findings = find(facts)
                self.looks.append((facts.unix_s, {one.kind for one in findings}, verdict(facts, findings)))
                time.sleep(_LOOK_S)


def why(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headrace.deploy", "why", *options, "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

"""Workers and env hosts that live but do nothing."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.deploy.fleet.watchdog import FleetWatchdog, first_sign_limits, why_silent
from headrace.deploy.process.liveness_file import seconds_silent
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.process.recorders import recorder_path
from headrace.deploy.process.supervisor import ProcessSpec, Role, Service
from headrace.schemas.accounts.ledger import Settled, WorkerTotals
from headrace.schemas.accounts.recorder import Reading
from headrace.schemas.accounts.recorder_file import WatchedCall
from headrace.schemas.accounts.user_calls import CallInProgress, UserCall
from headrace.schemas.settings.config import FleetConfig
from support.waiting import PATIENCE

if TYPE_CHECKING:
    from tests.deploy.conftest import Nursery

pytestmark = pytest.mark.processes

S = 1_000_000_000

TOUCHING = """
import sys, time, pathlib
from headrace.schemas.accounts.recorder import Recorder
life = int(sys.argv[1])
recorder = Recorder(pathlib.Path(sys.argv[2]) / f"worker-0-{life}.rec", 0, life)
while True:
    recorder.touch()
    time.sleep(0.02)
"""


def recorders_by_slot(folder: Path) -> Callable[[Service], Path | None]:
    def recorder_of(service: Service) -> Path | None:
        slot, child = service.spec.slot, service.child
        return recorder_path(folder, slot, child.incarnation) if child is not None and slot is not None else None

    return recorder_of


def reading(updated_ns: int, silent_until_ns: int = 0, watched: WatchedCall | None = None) -> Reading:
    return Reading(
        watched=watched or WatchedCall(),
        slot=0,
        incarnation=1,
        pid=1,
        updated_ns=updated_ns,
        silent_until_ns=silent_until_ns,
        accepted=0,
        totals=WorkerTotals(),
        settled=Settled(),
        window=[],
    )


def test_silence_is_counted_from_the_recorder() -> None:
    assert why_silent(reading(100 * S), 50.0, 109 * S, 10.0, 60.0) is None
    assert why_silent(reading(100 * S), 50.0, 111 * S, 10.0, 60.0) == "has been silent for 11.0 s"


def test_a_worker_may_be_silent_until_the_time_that_it_announced() -> None:
    assert why_silent(reading(100 * S, 300 * S), 50.0, 299 * S, 10.0, 60.0) is None
    assert why_silent(reading(100 * S, 300 * S), 50.0, 301 * S, 10.0, 60.0) is not None


STEP = CallInProgress(UserCall.STEP, 3, limit_s=60.0)


def test_a_call_that_keeps_the_interpreter_may_last_until_its_own_limit() -> None:
    told = reading(100 * S, watched=WatchedCall(STEP, beat_ns=100 * S, since_ns=100 * S))
    assert why_silent(told, 50.0, 169 * S, 10.0, 60.0) is None
    said = "has been silent for 71.0 s: env 3 has been in step for 71 s (env_step_timeout_s = 60)"
    assert why_silent(told, 50.0, 171 * S, 10.0, 60.0) == said


def test_a_call_whose_beginning_no_watch_has_seen_lasts_since_the_last_update() -> None:
    told = reading(100 * S, watched=WatchedCall(STEP))
    said = "has been silent for 71.0 s: env 3 has been in step for 71 s (env_step_timeout_s = 60)"
    assert why_silent(told, 50.0, 171 * S, 10.0, 60.0) == said


@pytest.mark.parametrize(("envs", "each"), [(1, ""), (2, ", for each of 2 envs")])
def test_the_limit_of_a_call_of_a_vector_is_told_as_that_of_each_env(envs: int, each: str) -> None:
    call = CallInProgress(UserCall.STEP, -envs, limit_s=60.0 * envs)
    assert call.in_words(130.0) == f"the vector of envs has been in step for 130 s (env_step_timeout_s = 60{each})"


def test_a_worker_whose_watch_gives_signs_of_life_is_not_silent() -> None:
    told = reading(100 * S, watched=WatchedCall(STEP, beat_ns=155 * S, since_ns=100 * S))
    assert why_silent(told, 50.0, 156 * S, 10.0, 60.0) is None


def test_an_overdue_call_is_silence_from_its_limit_on() -> None:
    told = reading(100 * S, 400 * S, WatchedCall(STEP, beat_ns=160 * S, since_ns=100 * S, is_overdue=True))
    assert why_silent(told, 50.0, 169 * S, 10.0, 60.0) is None
    said = "has been silent for 11.0 s: env 3 has been in step for 71 s (env_step_timeout_s = 60)"
    assert why_silent(told, 50.0, 171 * S, 10.0, 60.0) == said


def test_a_worker_may_be_without_a_recorder_for_its_first_minute() -> None:
    assert why_silent(None, 59.0, 0, 10.0, 60.0) is None
    assert why_silent(None, 61.0, 0, 10.0, 60.0) == "has given no sign of life in 61 s"


def test_a_stopped_worker_is_replaced_and_an_active_one_is_not(nursery: Nursery, tmp_path: Path) -> None:
    spec = ProcessSpec(
        "worker-0",
        Role.WORKER,
        lambda life: [sys.executable, "-c", TOUCHING, str(life), str(tmp_path)],
        slot=0,
    )
    service = nursery.supervisor.start(spec)
    watch = FleetWatchdog(
        nursery.loop, nursery.supervisor, recorders_by_slot(tmp_path), lease_s=PATIENCE, first_sign_s={}
    )
    nursery.until(lambda: (tmp_path / "worker-0-1.rec").exists())
    assert not nursery.loop.turn_until(lambda: service.restarts > 0, 1.5 * PATIENCE), "replaced although it was active"
    assert service.child is not None
    stopped = service.child
    stopped.send(signal.SIGSTOP)
    nursery.until(lambda: (tmp_path / "worker-0-2.rec").exists())
    nursery.until(lambda: not service.zombies)
    watch.stop()
    assert not is_alive(stopped.pid)
    assert service.restarts == 1


TURNING = """
import sys, time
from headrace.deploy.process.liveness_file import LivenessFile
sign = LivenessFile.from_environment()
while True:
    if sys.argv[1] == "turns": sign.touch()
    time.sleep(0.02)
"""


def test_an_env_host_without_signs_of_life_is_killed_and_replaced(nursery: Nursery, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", TURNING, "turns"]
    service = nursery.supervisor.start(ProcessSpec("env-host-0", Role.ENV_HOST, lambda _: argv))
    watch = FleetWatchdog(
        nursery.loop,
        nursery.supervisor,
        recorders_by_slot(tmp_path),
        lease_s=PATIENCE,
        first_sign_s={},
        limits_s={Role.ENV_HOST: 2 * PATIENCE},
    )
    stopped = service.child
    assert stopped is not None
    nursery.until(lambda: seconds_silent(stopped.liveness_path) is not None)
    assert not nursery.loop.turn_until(lambda: service.restarts > 0, 2.5 * PATIENCE), "replaced although it turned"
    stopped.send(signal.SIGSTOP)
    nursery.until(lambda: service.restarts == 1 and not service.zombies)
    watch.stop()
    assert not is_alive(stopped.pid)
    assert not stopped.liveness_path.exists()


def test_an_env_host_is_not_replaced_while_it_builds_its_first_env(nursery: Nursery, tmp_path: Path) -> None:
    """The first env may take long to build; it has a deadline of its own."""
    argv = [sys.executable, "-c", TURNING, "builds"]
    service = nursery.supervisor.start(ProcessSpec("env-host-0", Role.ENV_HOST, lambda _: argv))
    watch = FleetWatchdog(
        nursery.loop,
        nursery.supervisor,
        recorders_by_slot(tmp_path),
        0.4 * PATIENCE,
        first_sign_s=first_sign_limits(FleetConfig()),
        limits_s={Role.ENV_HOST: 0.1},
    )
    assert not nursery.loop.turn_until(lambda: service.restarts > 0, 0.8 * PATIENCE)
    watch.stop()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("role", [Role.BROKER, Role.LEARNER, Role.REDIS])
def test_a_process_that_is_stopped_for_long_is_killed_and_replaced(
    nursery: Nursery, tmp_path: Path, role: Role
) -> None:
    """The process never gave a sign of life. It is not killed before the time of a lease has passed."""
    service = nursery.start("import signal; print('up', flush=True); signal.pause()", role=role)
    watch = FleetWatchdog(
        nursery.loop, nursery.supervisor, recorders_by_slot(tmp_path), lease_s=PATIENCE, first_sign_s={}
    )
    nursery.until(lambda: nursery.says("child", "up"))
    stopped = service.child
    assert stopped is not None
    stopped.send(signal.SIGSTOP)
    assert not nursery.loop.turn_until(lambda: service.restarts > 0, 0.8 * PATIENCE)
    stopped.send(signal.SIGCONT)
    assert not nursery.loop.turn_until(lambda: service.restarts > 0, 1.5 * PATIENCE), "replaced although it went on"
    stopped.send(signal.SIGSTOP)
    nursery.until(lambda: nursery.says("child", "up", times=2))
    watch.stop()
    assert not is_alive(stopped.pid)
    assert service.restarts == 1


@pytest.mark.parametrize("first", ["turns", "hangs"])
@pytest.mark.parametrize("role", [Role.BROKER, Role.LEARNER])
def test_a_process_that_hangs_is_killed_and_replaced(nursery: Nursery, tmp_path: Path, role: Role, first: str) -> None:
    argv = [sys.executable, "-c", TURNING.replace("while True:", "for _ in range(9):") + "\nwhile True: pass", first]
    service = nursery.supervisor.start(ProcessSpec("child", role, lambda _: argv))
    limits = {role: PATIENCE}
    watch = FleetWatchdog(
        nursery.loop,
        nursery.supervisor,
        recorders_by_slot(tmp_path),
        0.4 * PATIENCE,
        first_sign_s={role: 2 * PATIENCE},
        limits_s=limits,
    )
    nursery.until(lambda: service.restarts == 1 and not service.zombies)
    watch.stop()


def test_a_silent_process_is_not_replaced_if_its_sign_of_life_cannot_be_written(
    nursery: Nursery, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", TURNING, "turns"]
    service = nursery.supervisor.start(ProcessSpec("env-host-0", Role.ENV_HOST, lambda _: argv))
    child = service.child
    assert child is not None
    nursery.until(lambda: seconds_silent(child.liveness_path) is not None)
    shutil.rmtree(nursery.logs)
    watch = FleetWatchdog(
        nursery.loop, nursery.supervisor, recorders_by_slot(tmp_path), 0.1, {Role.ENV_HOST: 0.0}, {Role.ENV_HOST: 0.0}
    )
    nursery.until(lambda: nursery.supervisor.failure is not None)
    watch.stop()
    assert service.child is child
    assert "it was removed while the fleet ran (env-host-0 has given no sign" in str(nursery.supervisor.failure)

"""The supervisor over small real processes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.deploy.process import restarts
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.process.proc_stat import is_alive
from headrace.deploy.process.supervisor import INCURABLE, ProcessSpec, Role, ServiceState
from headrace.schemas.errors import ExitCode, RunDirError, write_error

if TYPE_CHECKING:
    from tests.deploy.conftest import Nursery

pytestmark = pytest.mark.processes

SLEEP = "import signal; print('up', flush=True); signal.pause()"
ENDS = """
import sys
from headrace.deploy.process.exit_record import exit_record_path, write_exit_record
write_exit_record(exit_record_path(), {code}, "no such thing")
sys.exit({code})
"""
PORT_TAKEN_ON_RETURN = f"""
import os, signal, sys
if sys.argv[1] == "1": os.kill(os.getpid(), 9)
if sys.argv[1] == "2": exec({ENDS.format(code=6)!r})
print("up", flush=True)
signal.pause()
"""
DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"


def test_a_killed_process_comes_back_as_the_next_incarnation(nursery: Nursery) -> None:
    service = nursery.start(SLEEP)
    nursery.until(lambda: nursery.says("child", "up"))
    assert service.child is not None
    first = service.child.pid
    os.kill(first, signal.SIGKILL)
    nursery.until(lambda: nursery.says("child", "up", times=2))
    assert service.child is not None
    assert service.child.pid != first
    assert (service.child.incarnation, service.restarts, service.state) == (2, 1, ServiceState.RUNNING)
    assert nursery.notes.ends == [("child", 1, -signal.SIGKILL)]
    assert nursery.supervisor.restarts() == {"broker": 1}


def test_an_unrequested_clean_exit_counts_as_a_death(nursery: Nursery) -> None:
    over = """print('{"level": "info", "message": "it is over"}')"""
    service = nursery.start(
        f"import sys, signal\nif sys.argv[1] == '2': print('up', flush=True); signal.pause()\n{over}"
    )
    nursery.until(lambda: nursery.says("child", "up"))
    assert service.restarts == 1
    assert service.last_words == "exit code 0 (OK): it is over"


def test_a_crash_loop_ends_in_a_typed_error_that_shows_the_log(nursery: Nursery) -> None:
    service = nursery.start("import sys; print('about to fall'); sys.exit('the ground is gone')")
    nursery.until(lambda: nursery.supervisor.failure is not None)
    error = nursery.supervisor.failure
    assert isinstance(error, FleetError)
    assert error.exit_code is ExitCode.CRASH_LOOP
    assert "child died 4 times" in str(error)
    assert "the ground is gone" in str(error)
    assert (service.state, service.restarts) == (ServiceState.FAILED, 3)
    assert nursery.supervisor.gone()


def test_a_crash_loop_by_sigkill_says_what_saves_memory(nursery: Nursery) -> None:
    nursery.start("import os; os.kill(os.getpid(), 9)")
    nursery.until(lambda: nursery.supervisor.failure is not None)
    assert "or lower sampling.num_envs where memory is short" in str(nursery.supervisor.failure)


@pytest.mark.parametrize(
    "code",
    [ExitCode.CONFIG, ExitCode.ENV, ExitCode.ENV_RESTART_BUDGET, ExitCode.WRONG_FLEET, ExitCode.CRASH_LOOP],
)
def test_an_error_no_restart_can_cure_ends_the_fleet_with_its_own_code_and_sentence(
    nursery: Nursery, code: ExitCode
) -> None:
    service = nursery.start(ENDS.format(code=int(code)))
    nursery.until(lambda: nursery.supervisor.failure is not None)
    error = nursery.supervisor.failure
    assert isinstance(error, FleetError)
    log = f"; its log is {nursery.logs / 'child.log'}" if code is ExitCode.ENV_RESTART_BUDGET else ""
    assert (str(error), error.exit_code) == (f"child: no such thing{log}", code)
    assert service.restarts == 0


def test_an_optional_process_that_fails_for_good_does_not_end_the_fleet(nursery: Nursery) -> None:
    script = ENDS.format(code=int(ExitCode.ENV))
    spec = ProcessSpec("child", Role.EVALUATOR, lambda _: [sys.executable, "-c", script], optional=True)
    service = nursery.supervisor.start(spec)
    nursery.until(lambda: service.state is ServiceState.FAILED)
    assert nursery.supervisor.failure is None


@pytest.mark.parametrize("code", [*INCURABLE, ExitCode.PORT_IN_USE, ExitCode.FENCED])
def test_an_exit_code_that_was_not_announced_is_a_death_like_any_other(nursery: Nursery, code: ExitCode) -> None:
    service = nursery.start(
        f"""import os, signal, sys
if sys.argv[1] == "1":
    print("error: I am only a print of the env", flush=True)
    os._exit({int(code)})
print("up", flush=True)
signal.pause()""",
        role=Role.LEARNER,
    )
    nursery.until(lambda: nursery.says("child", "up"))
    assert (service.restarts, nursery.supervisor.failure) == (1, None)
    if code in INCURABLE:
        assert "which it did not announce" in service.last_words


def test_a_death_after_the_run_directory_was_removed_ends_the_fleet_and_says_so(nursery: Nursery) -> None:
    run = nursery.logs.parent
    service = nursery.start(f"import os, shutil; shutil.rmtree({str(nursery.logs)!r}); os._exit(7)")
    nursery.until(lambda: service.state is ServiceState.FAILED)
    assert str(nursery.supervisor.failure) == (
        f"run directory {run} cannot be used: it was removed while the fleet ran (child ended with exit code 7 "
        "(RUN_DIR)); start the fleet again"
    )


def test_a_taken_port_is_final_at_the_first_start_only(nursery: Nursery) -> None:
    nursery.start(PORT_TAKEN_ON_RETURN)
    nursery.until(lambda: nursery.says("child", "up"))
    assert nursery.supervisor.failure is None
    nursery.start(ENDS.format(code=6), name="other")
    nursery.until(lambda: nursery.supervisor.failure is not None)
    assert nursery.supervisor.failure is not None
    assert nursery.supervisor.failure.exit_code is ExitCode.PORT_IN_USE


def test_a_fenced_learner_is_not_started_again(nursery: Nursery) -> None:
    service = nursery.start(ENDS.format(code=12), name="learner", role=Role.LEARNER)
    nursery.until(nursery.supervisor.gone)
    assert (service.state, service.restarts, nursery.supervisor.failure) == (ServiceState.FENCED, 0, None)


def test_stop_drains_processes_and_kills_a_process_that_ignores_it(nursery: Nursery) -> None:
    polite = nursery.start(SLEEP, name="polite")
    nursery.start(DEAF, name="deaf")
    nursery.until(lambda: nursery.says("polite", "up") and nursery.says("deaf", "up"))
    nursery.supervisor.stop()
    nursery.until(nursery.supervisor.gone)
    assert polite.state is ServiceState.STOPPED
    assert sorted(nursery.notes.ends) == [("deaf", 1, -signal.SIGKILL), ("polite", 1, -signal.SIGTERM)]


def test_stop_cancels_a_restart_that_is_pending(nursery: Nursery) -> None:
    service = nursery.start("import sys; sys.exit(1)")
    nursery.until(lambda: service.state is ServiceState.RESTARTING)
    nursery.supervisor.stop()
    assert service.state is ServiceState.STOPPED
    assert nursery.supervisor.gone()


def test_a_hurried_role_restarts_without_a_pause_also_where_one_is_under_way(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_S", 1000.0)
    redis, broker = nursery.start(SLEEP, "redis", Role.REDIS), nursery.start(SLEEP, "broker")
    nursery.until(lambda: nursery.says("redis", "up") and nursery.says("broker", "up"))
    for service in (redis, broker):
        assert service.child is not None
        os.kill(service.child.pid, signal.SIGKILL)
    nursery.until(lambda: redis.state is broker.state is ServiceState.RESTARTING)
    nursery.supervisor.hurry(Role.REDIS)
    nursery.until(lambda: nursery.says("redis", "up", times=2))
    os.kill(redis.child.pid, signal.SIGKILL)
    nursery.until(lambda: nursery.says("redis", "up", times=3))
    assert (redis.restarts, broker.restarts, broker.state) == (2, 1, ServiceState.RESTARTING)


def test_stop_ends_a_stopped_process_as_well(nursery: Nursery) -> None:
    service = nursery.start(SLEEP)
    nursery.until(lambda: nursery.says("child", "up"))
    assert service.child is not None
    service.child.send(signal.SIGSTOP)
    nursery.supervisor.stop()
    nursery.until(nursery.supervisor.gone)


def test_a_replaced_process_with_a_port_is_killed_without_a_grace_period(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery.supervisor, "_zombie_grace_s", 3600.0)
    spec = ProcessSpec("worker-0", Role.WORKER, lambda _: [sys.executable, "-c", DEAF], slot=0, has_port=True)
    service = nursery.supervisor.start(spec)
    nursery.until(lambda: nursery.says("worker-0", "up"))
    nursery.supervisor.replace(service, "has been silent")
    nursery.until(lambda: nursery.says("worker-0", "up", times=2) and not service.zombies)
    assert nursery.notes.ends == [("worker-0", 1, -signal.SIGKILL)]


def test_a_replaced_process_lives_on_and_is_killed_after_its_grace(nursery: Nursery) -> None:
    service = nursery.start(DEAF, name="worker-0", role=Role.WORKER, slot=0)
    nursery.until(lambda: nursery.says("worker-0", "up"))
    assert service.child is not None
    old = service.child.pid
    nursery.supervisor.replace(service, "has been silent")
    assert [zombie.pid for zombie in service.zombies] == [old]
    assert is_alive(old)
    nursery.until(lambda: nursery.says("worker-0", "up", times=2) and not service.zombies)
    assert not is_alive(old)
    assert service.child is not None
    assert service.child.incarnation == 2
    assert nursery.notes.ends == [("worker-0", 1, -signal.SIGKILL)]


def test_a_process_that_cannot_be_started_for_want_of_descriptors_is_an_error_and_the_others_can_be_stopped(
    nursery: Nursery,
) -> None:
    service, other = nursery.start(SLEEP), nursery.start(SLEEP, "other")
    nursery.until(lambda: nursery.says("child", "up") and nursery.says("other", "up"))
    assert service.child is not None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare) + 1, limits[1]))
        with suppress(OSError):
            while True:
                spare.append(os.open(os.devnull, os.O_RDONLY))
        service.child.send(signal.SIGKILL)
        nursery.until(lambda: nursery.supervisor.failure is not None)
        nursery.supervisor.stop()
        nursery.until(nursery.supervisor.gone)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in spare:
            os.close(descriptor)
    assert (service.state, other.state) == (ServiceState.FAILED, ServiceState.STOPPED)
    error = nursery.supervisor.failure
    assert isinstance(error, RunDirError)
    assert "what child needs to start cannot be written (Too many open files); raise the limit" in str(error)


def test_a_used_up_quota_is_trouble_although_the_disk_has_free_room(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file needs no block, so no quota refuses it."""
    assert nursery.supervisor.trouble("a log", "it ended") is None

    def replace(path: Path, content: bytes) -> None:
        if content:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))

    monkeypatch.setattr("headrace.deploy.process.supervisor.replace_private", replace)
    trouble = nursery.supervisor.trouble("a log", "it ended")
    assert isinstance(trouble, RunDirError)
    assert "or raise your quota" in str(trouble)


def test_a_life_without_a_number_on_disk_does_not_begin(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    service = nursery.start(SLEEP)
    nursery.until(lambda: nursery.says("child", "up"))

    def next_incarnation(name: str) -> int:
        raise write_error("/run", OSError(errno.EROFS, "Read-only file system"), f"the number of {name}")

    monkeypatch.setattr(nursery.notes, "next_incarnation", next_incarnation)
    assert service.child is not None
    service.child.send(signal.SIGKILL)
    nursery.until(lambda: service.state is ServiceState.FAILED)
    assert "the number of child cannot be written (Read-only file system); mount it for writing" in str(
        nursery.supervisor.failure
    )

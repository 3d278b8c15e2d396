"""The supervisor's side of the check before a start, which runs `start_check.py` in a process of its own."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from itertools import takewhile

from headrace.deploy.process.child import LEFT, Child, describe_end
from headrace.deploy.process.child_commands import check_start
from headrace.deploy.process.child_environment import child_environment
from headrace.deploy.process.event_loop import EventLoop
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.process.fork_server import ForkServer
from headrace.deploy.process.stop_signals import StopSignals
from headrace.deploy.run.annexes import part
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.ports import check_ports
from headrace.deploy.run.redis_server import check_url, find_server
from headrace.deploy.run.resume import write_settings
from headrace.deploy.run.run_dir import RunDir, write_private
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.errors import ExitCode
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.supervisor")

STEP = "next: "
"""Prefix of the lines with which the process announces its steps."""
NOTE = "note: "
"""Prefix of what the process found that is no error."""
_START_S = 60.0
"""Seconds that the process may take in addition to its env."""
_COMPILE_S = 300.0
"""Seconds that it may take to compile modules, as a worker's pass may."""


def check_before_start(config: FleetConfig, run_dir: RunDir, signals: StopSignals, fork_server: ForkServer) -> None:
    """Check ports, Redis and Ray here, and the rest in a process. Returns early when a stop signal comes.

    Waits until `fork_server` is ready.

    Raises `PortInUseError`, `ConfigError`, `RedisUnavailableError`, or `FleetError` with the
    sentence and the exit code that a worker or the learner would end with.
    """
    check_ports(config)
    if config.ray.workers:
        part("check_cluster")(config.ray.address)
    if config.redis.url:
        known = read_fleet_file(run_dir.fleet_json).fleet_id if run_dir.fleet_json.exists() else ""
        check_url(config.redis.url, config.fleet.fleet_id or known)
    else:
        find_server()
    loop = EventLoop()
    loop.watch(signals.fd, signals.clear)
    await_fork_server(fork_server, signals, loop)
    if signals.count:
        return
    config_json = run_dir.logs / "check.json"
    write_private(config_json, write_settings(config))
    child = Child(
        check_start(config_json), run_dir.logs / "check.log", env=child_environment(1), fork_server=fork_server
    )
    sampling = config.sampling
    of_env_s = sampling.construct_timeout_s + sampling.env_reset_timeout_s + sampling.env_step_timeout_s
    rest_s = _START_S + _COMPILE_S * config.module.compile
    limit_s = of_env_s + rest_s
    ended = threading.Event()
    loop.watch(child.pidfd, ended.set)
    loop.wait(
        lambda: ended.is_set() or signals.count > 0, limit_s, lambda: f"the check before the start: {_step(child)}"
    )
    if not ended.is_set():
        child.send(signal.SIGKILL)
    returncode = child.reap()
    config_json.unlink(missing_ok=True)
    if not returncode or signals.count:
        for line in child.log_lines(200):
            if line.startswith(NOTE):
                log.warning("%s", line.removeprefix(NOTE))
            elif line.startswith(LEFT):
                log.warning(
                    "env %r was reset and stepped, but its %s would keep the process alive; each process is ended "
                    "all the same; end what the env starts in its close(), or start it with daemon=True",
                    config.sampling.env,
                    line.removeprefix(LEFT),
                )
        return
    if not ended.is_set():
        raise FleetError(
            f"{_step(child)} was not done after {limit_s:g} s: {of_env_s:g} s of 3 * sampling.env_reset_timeout_s "
            f"and env_step_timeout_s, and {rest_s:g} s for the rest; raise them, or start "
            "without: --no-check-env",
            ExitCode.ENV,
        )
    raise _error(child, returncode)


def await_fork_server(fork_server: ForkServer, signals: StopSignals, loop: EventLoop) -> None:
    """Wait until the fork server can fork or has ended, or until a stop signal comes. Stop it after 60 s."""
    loop.watch(fork_server.fd, fork_server.take_news)
    loop.wait(
        lambda: fork_server.is_ready or fork_server.has_ended or signals.count > 0,
        _START_S,
        lambda: "the import of torch",
    )
    loop.forget(fork_server.fd)
    if not fork_server.is_ready:
        fork_server.close()


def _error(child: Child, returncode: int) -> FleetError:
    """Return the error with which the process ended, and show what user code has printed."""
    for line in takewhile(lambda line: not line.startswith("error: "), child.log_lines(60)):
        if not line.startswith(STEP):
            say(line, sys.stderr)
    record = child.exit_record
    if record is not None and record.sentence:
        return FleetError(record.sentence, ExitCode(record.exit_code))
    end = describe_end(returncode)
    return FleetError(f"{_step(child)} ended its process with {end}; see what it printed above", ExitCode.ENV)


def _step(child: Child) -> str:
    steps = [line for line in child.log_lines(200) if line.startswith(STEP)]
    return steps[-1].removeprefix(STEP) if steps else "starting the check"

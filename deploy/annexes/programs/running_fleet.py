"""A fleet that runs while a program of the user's own does: `headrace up` as a process of this program.

with headrace.fleet("CartPole-v1", workers=3) as run, run.stream() as stream, run.weights() as weights:
    module = actor_critic(stream.spaces())
    weights.publish(module.state_dict())
    for batch in stream:
        ...
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from inspect import signature
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Self, TypeVar

import orjson

from headrace.deploy.annexes.programs.importable import import_name
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.process.parent_death import bound_to_us
from headrace.deploy.run.run_dir import new_run_dir
from headrace.learner_stub.link.fleet_place import keys_folder
from headrace.schemas.basics.printable import to_paste
from headrace.schemas.basics.run_files import read_object
from headrace.schemas.basics.stop_event import signal_name
from headrace.schemas.errors import ConfigError, ExitCode, HeadraceError, absolute
from headrace.schemas.peers.fleet_address import RunDirAddresses, await_address, how_it_ended
from headrace.schemas.settings.config_loading import known_keys
from headrace.schemas.settings.nearest_names import nearest_name
from headrace.workers.envs.creators import registered_creator

if TYPE_CHECKING:  # a program that only reads the stream needs no torch
    from headrace.learner_stub import EpisodeStream, TaskPublisher, WeightPublisher

log = logging.getLogger("headrace.fleet")

_Connection = TypeVar("_Connection", "EpisodeStream", "TaskPublisher", "WeightPublisher")

INSIDE = "HEADRACE_STARTED_BY"
"""Variable of all processes of such a fleet. Its value is the program's process id."""
_QUIET_S = 10.0
_SETTINGS = "settings={...} takes all settings by their keys, which `headrace up --print-config` lists"


def fleet(
    env: str | Callable[..., Any] | None = None,
    *,
    workers: int | None = None,
    num_envs: int | None = None,
    module: str | Callable[..., Any] | None = None,
    seed: int | None = None,
    env_config: Mapping[str, Any] | None = None,
    until_steps: int | None = None,
    until_return: float | None = None,
    run_dir: str | Path | None = None,
    config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    **unknown: Never,
) -> RunningFleet:
    """Start a fleet on this machine, without a learner: this program is the learner. Return once it serves.

    - env: a gymnasium id, "package.module:make_env", an env class, or a function that builds an env.
    - workers, num_envs, seed: as for `headrace up`: worker processes, envs in each, the root of all seeds.
    - module: a function that builds the policy from its `Spaces`, or the name of the function; None: an actor-critic.
    - env_config: keyword arguments of a gymnasium id, or the `EnvContext` of a callable.
    - until_steps, until_return: the goal, at which the fleet ends: a number of env steps, a mean return.
    - run_dir: the folder of the run; None: a new one in runs/. The run in the folder goes on, if there is one.
    - config: a fleet.toml, or the name of a recipe.
    - settings: all others, such as {"sampling.rollout_fragment_length": 64}.

    Workers import `env` and `module` by their names. A program that defines them itself starts its fleet under
    `if __name__ == "__main__":`, since workers import the program too.

    Raises `ConfigError` for an unknown argument and for what workers cannot import, and `FleetError` with what
    `headrace up` says where the fleet does not start.
    """
    if INSIDE in os.environ:
        raise ConfigError(
            "a worker of a fleet imports this program to find its env or module, and the program starts a fleet; "
            'put what starts the fleet below `if __name__ == "__main__":`'
        )
    if unknown:
        raise _unknown(next(iter(unknown)))
    folders: list[str] = []
    options: list[str] = []
    env_name = _named(env, "env", folders)
    flags = {"--env": env_name, "--workers": workers, "--num-envs": num_envs, "--seed": seed, "--config": config}
    for option, value in flags.items():
        options += [] if value is None else [option, str(value)]
    module_name = _named(module, "module", folders)
    others = {
        "module.build": module_name,
        "sampling.env_config": env_config,
        "fleet.until_steps": until_steps,
        "fleet.until_return": until_return,
    }
    given = {key: value for key, value in others.items() if value is not None}
    for key, value in ({"learner.enabled": False} | given | dict(settings or {})).items():
        plain = _named(value, key, folders) if callable(value) else value
        options += ["--set", f"{key}={_as_json(key, plain)}"]
    path = Path(run_dir) if run_dir is not None else new_run_dir(env_name or "fleet")
    return RunningFleet(path, options, folders)


def _unknown(name: str) -> ConfigError:
    own = signature(fleet).parameters.keys() - {"unknown"}
    setting = nearest_name(name, known_keys(), cutoff=0.6)
    advice = nearest_name(name, own, cutoff=0.6) or (setting and f'settings={{"{setting}": ...}}')
    return ConfigError(f"fleet() has no argument {name!r}; " + (f"did you mean {advice}?" if advice else _SETTINGS))


def _named(target: str | Callable[..., Any] | None, key: str, folders: list[str]) -> str | None:
    """Return the name that workers import; add the folder that they need for that to `folders`."""
    if isinstance(target, str):
        creator = registered_creator(target) if key == "env" else None
        return target if creator is None else _named(creator, key, folders)
    if target is None:
        return None
    name, folder = import_name(target, key)
    if folder is not None:
        folders.append(str(folder))
    return name


def _as_json(key: str, value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError as error:
        raise ConfigError(f"{value!r:.120} is no plain value ({error})", key=key) from None


_open: list[RunningFleet] = []


class RunningFleet:
    """A fleet that this program has started. Leaving its `with` block, or `close`, drains and stops it.

    The fleet also ends when the program ends or is killed. Ctrl-C interrupts the program alone.
    """

    def __init__(self, path: Path, options: list[str], folders: list[str]) -> None:
        self.path = absolute(path)
        """The run directory, for `headrace why`, `headrace audit` and others."""
        for other in _open:
            log.warning("the fleet in %s, which this program has started, still runs; its close() ends it", other.path)
        self._connections: list[weakref.ref[EpisodeStream | TaskPublisher | WeightPublisher]] = []
        self._has_told = False
        self._errors: list[str] = []
        self.summary: dict[str, Any] = {}
        """The output of `headrace up --json` at its end: steps, episodes, ledger and others. Empty until then."""
        command = [sys.executable, "-m", "headrace.deploy", "up", *options, "--run-dir", str(path), "--json", "--quiet"]
        python_path = [*dict.fromkeys(folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path), INSIDE: str(os.getpid())}
        started: Future[subprocess.Popen[str]] = Future()
        # The kernel binds a process to the thread that starts it. This thread lives as long as the process.
        self._attendant = Thread(
            target=self._attend, args=(started, command, environment), name="headrace up", daemon=True
        )
        self._attendant.start()
        self._up = started.result()
        atexit.register(self._stop)
        _open.append(self)
        self._addresses = _OwnFleet(path, self._up)
        try:
            await_address(self._addresses, "learner", math.inf, self._waited)
        except BaseException:
            self._stop()
            raise

    def __repr__(self) -> str:
        state = f"running, page {self.dashboard or 'not yet'}" if self.is_running else "ended"
        streams = [repr(opened) for known in self._connections if hasattr(opened := known(), "delivered")]
        return f"<RunningFleet in {self.path}: {'; '.join([state, *streams])}>"

    @property
    def is_running(self) -> bool:
        """Return whether `headrace up` runs. It ends by itself at a goal that `settings` name, or where it fails."""
        return self._up.poll() is None

    @property
    def dashboard(self) -> str:
        """Return the address of the fleet's page; "" until the page starts, and where the fleet has none."""
        return self._addresses.find("dashboard")

    def stream(self, **options: Any) -> EpisodeStream:
        """Return a stream of the fleet's chunks, with `options` of `EpisodeStream`. It ends when the fleet does."""
        from headrace.learner_stub import EpisodeStream

        return self._opened(EpisodeStream, options)

    def weights(self, **options: Any) -> WeightPublisher:
        """Return a publisher of weights to the workers, with `options` of `WeightPublisher`."""
        from headrace.learner_stub import WeightPublisher

        return self._opened(WeightPublisher, options)

    def tasks(self, **options: Any) -> TaskPublisher:
        """Return a publisher of tasks to the workers, with `options` of `TaskPublisher`."""
        from headrace.learner_stub import TaskPublisher

        return self._opened(TaskPublisher, options)

    def close(self) -> None:
        """Close what `stream`, `weights` and `tasks` opened, drain the fleet and stop it. A second call does nothing.

        Raises `FleetError` with what `headrace up` says where the fleet has failed, or its books do not balance.
        """
        self._stop()
        if self._up.returncode != ExitCode.OK and not self._has_told:
            raise self._failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except FleetError as failure:
            if error is None or isinstance(error, HeadraceError):
                raise  # the failure of the fleet is the reason for an error of the connection to it
            log.warning("the fleet in %s has failed too: %s", self.path, failure)

    def _opened(self, kind: Callable[..., _Connection], options: Mapping[str, Any]) -> _Connection:
        found = {"rendezvous": self._addresses, "run_dir": self.path, "keys": keys_folder(self.path)}
        if not self.is_running:
            raise self._failure()
        connection = kind(self._addresses.find("learner"), **{**found, **options})
        self._connections.append(weakref.ref(connection))
        return connection

    def _waited(self, pause_s: float) -> bool:
        """Sleep for `pause_s` while the fleet starts. Return whether it never will. Raises its error."""
        time.sleep(pause_s)
        if not self.is_running and self._up.returncode != ExitCode.OK:
            raise self._failure()
        return not self.is_running

    def _stop(self) -> None:
        """End `headrace up`, and wait for the end. It has deadlines of its own."""
        for reference in self._connections:
            if (connection := reference()) is not None:
                connection.close()
        self._connections.clear()
        if self.is_running:
            self._up.terminate()
        try:
            self._up.wait()
        except BaseException:  # Ctrl-C once more: no drain
            self._up.terminate()
            self._up.wait()
            raise
        self._attendant.join()
        atexit.unregister(self._stop)
        if self in _open:
            _open.remove(self)

    def _attend(
        self, started: Future[subprocess.Popen[str]], command: list[str], environment: Mapping[str, str]
    ) -> None:
        """Start `headrace up`, hand on its warnings until it ends, and keep its summary. Runs in its own thread."""
        with tempfile.TemporaryFile() as told:
            try:
                process = subprocess.Popen(
                    [*bound_to_us(), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=told,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                    text=True,
                    errors="replace",
                )
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                started.set_exception(error)
                return
            started.set_result(process)
            with process:
                assert process.stderr is not None
                for line in process.stderr:
                    if line.startswith("error: "):
                        self._errors.append(line.removeprefix("error: "))
                    else:
                        sys.stderr.write(line)
            told.seek(0)
            with suppress(orjson.JSONDecodeError):  # it was killed, or has not begun
                self.summary = orjson.loads(told.read())

    def _failure(self) -> FleetError:
        """Return the error with which `headrace up` has ended."""
        self._stop()
        self._has_told = True
        code = self._up.returncode
        if code < 0:
            return FleetError(f"`headrace up` of the fleet in {self.path} was killed by {signal_name(-code)}")
        if code == ExitCode.OK and (ended := self._addresses.stopped()) is not None:
            return ended
        said = self.summary.get("error") or "".join(self._errors).strip()
        if not said and self.summary.get("balanced") is False:
            audit = f"headrace audit {to_paste(self.path)}"
            said = f"the fleet in {self.path} does not balance: `{audit}` says what is missing"
        said = said or f"`headrace up` of the fleet in {self.path} ended with exit code {code}"
        said = str(said).replace(" (from flag)", "")  # the program has given none
        return FleetError(said, ExitCode(code) if code in set(ExitCode) else ExitCode.FAILURE)


class _OwnFleet:
    """The addresses of a fleet whose `headrace up` is a process of this program. No other start of it is due."""

    def __init__(self, path: Path, process: subprocess.Popen[str]) -> None:
        self.path = absolute(path)
        self._in_run_dir = RunDirAddresses(path, running=True)
        self._process = process
        self._say_at = time.monotonic() + _QUIET_S

    @property
    def problem(self) -> str:
        """Return a text on what the fleet does before it serves; "" in the first seconds."""
        return "" if time.monotonic() < self._say_at else f"`headrace up` starts the fleet in {self.path}"

    def find(self, role: str) -> str:
        """Return the address for peers of `role`, once this very `headrace up` serves."""
        owner = read_object(self.path / "fleet.json").get("supervisor_pid")
        return self._in_run_dir.find(role) if owner == self._process.pid else ""

    def stopped(self) -> FleetError | None:
        """Return an error that says so, if `headrace up` has ended."""
        if not self.at_goal:
            return None
        end = how_it_ended(self.path) or f"the fleet in {self.path} has ended"
        return FleetError(f"{end}; go on with headrace.fleet(..., run_dir={str(self.path)!r})")

    @property
    def at_goal(self) -> bool:
        """Return whether `headrace up` has ended, at its goal or not."""
        return self._process.poll() is not None

"""`headrace worker --count N`: keeps N workers alive on this machine, for a fleet whose broker is anywhere.

    SCRATCH/FLEET/recorders   recorders of this machine's workers of the fleet, of earlier groups too
    SCRATCH/FLEET/logs        their logs
    RUN_DIR/recorders, logs   where both go at the end; without a scratch folder they are here from the start

Each worker asks the broker for a slot, and for the slot of its earlier life when it was killed. The group tells the
broker what the recorders of killed workers contain, also those of an earlier group that was killed itself. It drains
at SIGTERM, and ends with an error when it found no broker for `worker.connect_timeout_s`.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import orjson

from headrace.deploy.fleet.check_process import await_fork_server
from headrace.deploy.fleet.obituary_sender import ObituarySender, reason_of
from headrace.deploy.fleet.watchdog import FleetWatchdog, first_sign_limits
from headrace.deploy.process.child import Child
from headrace.deploy.process.child_commands import group_worker, worker_of_group
from headrace.deploy.process.event_loop import EventLoop, StandstillWatch
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.process.fork_server import ForkServer
from headrace.deploy.process.recorders import Life, has_delivered, recorder_path, recorders_in
from headrace.deploy.process.service_manager import service_manager
from headrace.deploy.process.stop_signals import StopSignals
from headrace.deploy.process.supervisor import Role, Service, Supervisor
from headrace.deploy.run.joining import Joined
from headrace.deploy.run.run_dir import file_name_of, write_private
from headrace.deploy.terminal.log_rotation import LogRotation
from headrace.schemas.accounts.recorder import read_recorder
from headrace.schemas.credentials.keys import client_keys
from headrace.schemas.errors import ExitCode, HeadraceError, writing
from headrace.schemas.messages.shared_weights import remove_unused_weights

log = logging.getLogger("headrace.supervisor")

_TURN_S = 0.5
_LOOK_S = 1.0
_FINAL_S = 5.0
"""Seconds that the end waits for the broker to say that the books are final. Recorders are kept otherwise."""


def run_group(
    fleet: Joined, options: Sequence[str], count: int, fork_server: ForkServer, scratch_dir: Path | None
) -> None:
    """Keep `count` workers alive until a stop signal, then drain them. `fork_server` has their environment.

    `options` are those of `headrace worker` that name the fleet. Raises the error that ended the group, `RunDirError`
    where its folder cannot be made, or `KeysError`.
    """
    with StopSignals() as signals:
        group = WorkerGroup(fleet, options, signals, fork_server, scratch_dir)
        with LogRotation(group.logs), StandstillWatch(group.loop, group.folder):
            try:
                group.start(count)
                group.run()
            finally:
                group.close()


class WorkerGroup:
    """The workers of one machine, their supervisor, and the sender of their obituaries. Main thread only.

    Raises `RunDirError` where its folder cannot be made, and `KeysError`.
    """

    def __init__(
        self,
        fleet: Joined,
        options: Sequence[str],
        signals: StopSignals,
        fork_server: ForkServer | None = None,
        scratch_dir: Path | None = None,
    ) -> None:
        self._config, self._fleet, self._options, self._signals = fleet.config, fleet, options, signals
        config = fleet.config
        self._run_dir = Path(config.fleet.run_dir)
        self.folder = (scratch_dir / file_name_of(fleet.fleet_id) if scratch_dir else self._run_dir).absolute()
        self.recorders, self.logs = self.folder / "recorders", self.folder / "logs"
        self._name = f"{file_name_of(platform.node())}-{os.getpid()}"
        self._config_json = self.folder / f".workers-{self._name}.json"
        self._incarnations = itertools.count(1)
        self._lives: dict[str, Life] = {}
        """The life of each child that has joined, by the child's name."""
        self._unreachable: HeadraceError | None = None
        self._fleet_has_ended = False
        with writing(self.folder):
            for folder in (self.recorders, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._config_json, orjson.dumps(config.model_dump(mode="json")))
        keys = client_keys(config.keys.dir, "supervisor", config.keys.group)
        self.loop = EventLoop()
        self.loop.watch(signals.fd, signals.clear)
        self._fork_server = fork_server
        self._obituaries = ObituarySender(
            self.loop, fleet.endpoint, fleet.fleet_id, self.recorders, keys, reads_redis=False
        )
        self.supervisor = Supervisor(
            self.loop, config.supervisor, config.broker.zombie_grace_s, self.logs, self, fork_server=fork_server
        )
        self._watchdog = FleetWatchdog(
            self.loop, self.supervisor, self.recorder_of, config.broker.lease_s, first_sign_limits(config)
        )

    def start(self, count: int) -> None:
        """Send obituaries for recorders of earlier groups. Then start `count` workers, unless a stop signal comes.

        Wait until the fork server can fork them. If executed now, each worker would import torch while the fork server
        does.
        """
        self._obituaries.send_left_over()
        if self._fork_server is not None:
            await_fork_server(self._fork_server, self._signals, self.loop)
        if self._signals.count:
            return
        for number in range(count):
            name = f"worker-{self._name}-{number}"
            command = group_worker(self._config_json, self.folder, self._options)
            self.supervisor.start(worker_of_group(self._config, name, command, self._slot_of(name)))
        many = "1 worker" if count == 1 else f"{count} workers"
        log.info("%s for fleet %s at %s; files in %s", many, self._fleet.fleet_id, self._fleet.endpoint, self.folder)

    def run(self) -> None:
        """Turn the loop until a stop signal, or until workers leave with the fleet. Raises the error that ends it."""
        self._look()
        service_manager().follow(self.loop)
        service_manager().ready()
        while not self._signals.count and not self._fleet_has_ended:
            self.loop.turn(_TURN_S)
            if failure := self.supervisor.failure or self._unreachable:
                raise failure

    def close(self) -> None:
        """Drain the workers, tell the broker of their ends, and move what is left of their files to the run directory.

        A second signal kills the workers.
        """
        service_manager().stopping()
        self._watchdog.stop()
        self.supervisor.stop(Role.WORKER)
        asked = self._signals.count
        limit_s = self._config.supervisor.stop_timeout_s + 5.0
        self.loop.turn_until(lambda: self.supervisor.gone() or self._signals.count > max(asked, 1), limit_s)
        self.supervisor.kill()
        self.loop.turn_until(self.supervisor.gone, 5.0)
        self._obituaries.send_ended(())
        source = self._fleet.source
        stopped = source.stopped if source is not None else lambda: None  # once it says so, the broker answers no more
        self.loop.turn_until(lambda: self._obituaries.all_final() or stopped() is not None, _FINAL_S)
        if not self._obituaries.all_final():
            log.info("recorders of workers that ended stay until the broker has stored their books")
        self._obituaries.close()
        self._config_json.unlink(missing_ok=True)
        remove_unused_weights()
        self._sweep()

    def recorder_of(self, service: Service) -> Path | None:
        """Return the recorder of the present life of a worker; None before it has joined the fleet."""
        child = service.child
        if child is None:
            return None
        life = self._lives.get(service.spec.name)
        if life is None or not self._is_of(life, child):
            life = next((life for life, _ in recorders_in(self.recorders) if self._is_of(life, child)), None)
            if life is None:
                return None
            self._lives[service.spec.name] = life
        return recorder_path(self.recorders, *life)

    def _is_of(self, life: Life, child: Child) -> bool:
        reading = read_recorder(recorder_path(self.recorders, *life))
        return reading is not None and reading.pid == child.pid and reading.updated_ns >= child.started * 1e9

    def _slot_of(self, name: str) -> Callable[[], int | None]:
        return lambda: self._lives[name][0] if name in self._lives else None

    # Methods of `Observer`, which the supervisor calls.

    def next_incarnation(self, name: str) -> int:
        """Return a number for the files of the next life. The broker gives the life its incarnation."""
        return next(self._incarnations)

    def changed(self) -> None:
        """Do nothing: a group reports no process states."""

    def has_delivered(self, service: Service, child: Child) -> bool:
        """Return whether the recorder of this life knows of a committed step."""
        recorder = self.recorder_of(service)
        return recorder is not None and has_delivered(recorder)

    def ended(self, service: Service, child: Child, returncode: int) -> None:
        """Send the obituary of a life that had joined. Note that the broker was unreachable for too long."""
        recorder = self.recorder_of(service) if child is service.child else None
        if recorder is not None:
            life = self._lives[service.spec.name]
            self._obituaries.send_end(*life, reason_of(child.exit_record))
        if returncode == ExitCode.OK and self._config.worker.ends_with_fleet:
            self._fleet_has_ended = True
            self.supervisor.stop_one(service)  # so that it is not started again
        record = child.exit_record
        if record is not None and record.exit_code == ExitCode.FENCED:
            self._lives.pop(service.spec.name, None)  # another process has the slot: the next life asks for any slot
        if record is not None and record.exit_code == ExitCode.UNREACHABLE and not self._signals.count:
            self._unreachable = FleetError(f"{service.spec.name}: {record.sentence}", ExitCode.UNREACHABLE)

    def _look(self) -> None:
        """Look, now and every second, for the broker, and for workers of other groups that have ended here."""
        self.loop.call_later(_LOOK_S, self._look)
        services = self.supervisor.services.values()
        own = {self._lives[service.spec.name] for service in services if self.recorder_of(service) is not None}
        self._obituaries.send_ended(own)
        if self._fleet.source is not None and not self._obituaries.all_acknowledged():
            self._obituaries.follow(self._fleet.source.find("worker"))

    def _sweep(self) -> None:
        """Move logs, and recorders whose books are not final, from the scratch folder to the run directory.

        Leave recorders of living processes, and files that cannot be moved.
        """
        if self.folder == self._run_dir.absolute():
            return
        logs = [path for path in self.logs.iterdir() if path.name.startswith(f"worker-{self._name}-")]
        _move(logs, self._run_dir / "logs")
        ended = [path for life, path in recorders_in(self.recorders) if self._obituaries.knows(life)]
        _move(ended, self._run_dir / "recorders")


def _move(files: Iterable[Path], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.move(path, folder / path.name)
    except OSError as error:
        log.warning("files of workers stay in their scratch folder: %s cannot be written (%s)", folder, error)

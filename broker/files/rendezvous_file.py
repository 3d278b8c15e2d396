"""Publishes the broker's addresses at the rendezvous of its fleet, for as long as it serves."""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from headrace.schemas.basics.run_files import read_object
from headrace.schemas.errors import RunDirError, writing
from headrace.schemas.peers.rendezvous import LIFETIME_S, Port, Published, Rendezvous

log = logging.getLogger(__name__)

_CLOSE_S = 2.0
_CLOCKS_DIFFER_MS = 24 * 3600 * 1000
"""A broker that began so much later than now is none: nobody could ever publish after it."""


class RendezvousFile:
    """The file at `path`, written immediately, and again before it expires.

    A thread of its own writes the file, since a shared folder may be slow. The thread writes again when ports of
    workers change, and stops once a later broker of the fleet writes there. Raises `RunDirError` where the file cannot
    be written, or another fleet publishes there.
    """

    def __init__(self, path: Path, published: Published) -> None:
        self._path, self._published = path, published
        self._closing = threading.Event()
        self._changed = threading.Event()
        self._failed = False
        other = self._other()
        if other is not None and other.fleet_id != published.fleet_id and other.state == "running":
            raise RunDirError(
                str(path.parent),
                f"fleet {other.fleet_id} publishes its addresses in {path.name}",
                "name another file in fleet.rendezvous",
            )
        with writing(path, "the addresses of the fleet"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write("running")
        self._thread = threading.Thread(target=self._keep, name="rendezvous", daemon=True)
        self._thread.start()

    def publish(self, ports: Mapping[str, Port]) -> None:
        """Publish these ports of workers in place of those before."""
        if ports != self._published.ports:
            self._published = self._published.model_copy(update={"ports": dict(ports)})
            self._changed.set()

    def close(self, *, stopped: bool) -> None:
        """Stop writing. `stopped`: the fleet has ended in order, which the file then says."""
        self._closing.set()
        self._changed.set()
        self._thread.join(_CLOSE_S)
        if stopped and not self._thread.is_alive():
            self._try_to_write("stopped")

    def _keep(self) -> None:
        while not self._closing.is_set():
            self._changed.wait(LIFETIME_S / 4)
            self._changed.clear()
            if not self._closing.is_set():
                self._try_to_write("running")

    def _try_to_write(self, state: str) -> None:
        other = self._other()
        if other is not None and self._published.epoch < other.epoch < time.time() * 1000 + _CLOCKS_DIFFER_MS:
            log.warning("%s is of a later broker now; this one publishes no more", self._path)
            self._closing.set()
            return
        try:
            self._write(state)
        except OSError as error:
            if not self._failed:
                log.warning("%s cannot be written (%s): new peers may not find this broker", self._path, error)
            self._failed = True
        else:
            self._failed = False

    def _write(self, state: str) -> None:
        update = {"state": state, "expires_unix_s": time.time() + LIFETIME_S}
        self._published.model_copy(update=update).write(self._path)

    def _other(self) -> Published | None:
        return Rendezvous(str(self._path)).look()


def note_stopped(path: Path, *, at_goal: bool = False) -> None:
    """Write that the fleet has stopped, in place of a broker of this machine that was killed and is not restarted.

    Workers on other machines then do not wait for that broker, and learners not for a fleet `at_goal`, which is noted
    after a broker that ended in order, too. A file that a broker of another machine has published stays.
    """
    with suppress(ValidationError):  # no broker has published
        published = Published.model_validate(read_object(path))
        is_news = published.state == "running" or at_goal > published.at_goal
        if is_news and published.host == platform.node():
            try:
                published.model_copy(update={"state": "stopped", "at_goal": at_goal}).write(path)
            except OSError as error:
                log.warning("%s cannot be written (%s): workers elsewhere go on waiting for a broker", path, error)

"""The rendezvous of a fleet: where its broker publishes its addresses, and peers on any machine find them.

    PATH              a file in a folder that the machines share; the broker writes it
    http(s)://...     the same content, from a web server
    dns://NAME        no content: the broker's machine, at broker.port in the settings and the ports after it

The content is JSON, and is replaced in one step:

    version           1
    fleet_id          name of the fleet
    host              name of the broker's machine
    state             "running", or "stopped" once the broker has ended in order
    at_goal           whether a fleet that has stopped has reached its goal, so that no start of it is due
    epoch             Unix time, ms, at which this broker started; that of its successor is larger
    endpoints         role -> address: worker, learner, weights
    keys              fingerprint of the broker's public key, under "broker"; empty without keys
    ports             "envs-SLOT", "clients-SLOT", "http-SLOT" -> a port of a worker: its address, the name of the
                      worker's machine, the fingerprint of the worker's key, and whether it waits for env hosts
    expires_unix_s    Unix time, s, after which a broker that lives would have written it again

The content holds no secret. All of it is a claim: readers bound each number and name, and ask the broker that answers
for its fleet again.
"""

from __future__ import annotations

import platform
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Literal, NoReturn
from urllib.error import HTTPError
from urllib.parse import urlsplit

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from headrace.schemas.accounts.worker_figures import PortAddress
from headrace.schemas.basics.addresses import is_broker_address
from headrace.schemas.basics.run_files import read_regular, replace_private
from headrace.schemas.errors import ConfigError, HeadraceError, UnreachableError, absolute
from headrace.schemas.peers.http_hosts import BY_PROGRAM
from headrace.schemas.peers.socket_folder import check_socket
from headrace.schemas.settings.config import is_loopback

LIFETIME_S = 60.0
"""Seconds for which a published rendezvous is good. The broker writes it again four times in that time."""

RENDEZVOUS_VARIABLE = "HEADRACE_FLEET__RENDEZVOUS"
"""The environment variable that names it, like the setting `fleet.rendezvous`."""

MOST_PORTS = 4096
"""Ports of workers that a broker publishes at most."""

_LARGEST = 2 << 20
_ANSWER_S = 5.0
_Name = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_.-]+$")]


def _checked(address: str) -> str:
    if not is_broker_address(address):
        raise ValueError(f"an address should be tcp://HOST:PORT or ipc:///PATH, got {address!r:.120}")
    return address


_Address = Annotated[str, AfterValidator(_checked)]


class Port(BaseModel):
    """A port of a worker, for env hosts or clients."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    address: PortAddress
    host: str = Field(default="", max_length=255)
    """Name of the worker's machine."""
    key: str = Field(default="", max_length=64)
    """Fingerprint of the worker's public key; "" without keys."""
    lacks_hosts: bool = False
    """True while envs of the worker wait for an env host."""


class Published(BaseModel):
    """The content of a rendezvous; the fields are described above."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)
    version: Literal[1] = 1
    fleet_id: Annotated[str, Field(max_length=255, pattern=r"^[A-Za-z0-9_.-]*$")]
    host: str = Field(default="", max_length=255)
    state: Literal["running", "stopped"] = "running"
    at_goal: bool = False
    epoch: int = Field(default=0, ge=0, lt=1 << 63)
    endpoints: Annotated[dict[_Name, _Address], Field(max_length=4096)]
    keys: Annotated[dict[_Name, Annotated[str, Field(max_length=64)]], Field(max_length=16)] = {}
    ports: Annotated[dict[_Name, Port], Field(max_length=MOST_PORTS)] = {}
    expires_unix_s: float = Field(default=1e18, ge=0)

    @classmethod
    def parse(cls, content: bytes) -> Published:
        """Return what these bytes publish. Raises `ValueError`."""
        return cls.model_validate(orjson.loads(content))

    def dump(self) -> bytes:
        """Return the content of the file."""
        return orjson.dumps(self.model_dump(), option=orjson.OPT_INDENT_2)

    def write(self, path: Path, mode: int = 0o644) -> None:
        """Replace the file in one step. Raises `OSError`."""
        replace_private(path, self.dump(), mode)


class Rendezvous:
    """The rendezvous at `where`, as peers read it.

    `ports` are by role, for `dns://`; `setting` is the one that names them. What another fleet than the attribute
    `fleet_id` publishes does not count; "": that of any fleet does. Raises `ConfigError` for another form of address.
    """

    def __init__(self, where: str, ports: Mapping[str, int] | None = None, setting: str = "broker.port") -> None:
        self.where = where if "://" in where else str(absolute(where))
        self.fleet_id = ""
        self.problem = ""
        """Text on why the last look found no fleet that runs; "" if it found one."""
        self.at_goal = False
        """True if the fleet had reached its goal at the last look."""
        scheme = urlsplit(where).scheme if "://" in where else ""
        self._fixed = _by_name(where, ports or {}, setting) if scheme == "dns" else None
        self._fetcher = _Fetcher(where) if scheme in ("http", "https") else None
        if scheme not in ("", "dns", "http", "https"):
            _refuse(where, "should be a path, http://, https:// or dns://NAME")

    def look(self) -> Published | None:
        """Return what is published now; None where `problem` says why not. A web server is asked in the background."""
        if self._fixed is not None:
            return self._fixed
        try:
            fetcher = self._fetcher
            content = fetcher.newest() if fetcher is not None else read_regular(Path(self.where), _LARGEST)
            found = Published.parse(content)
        except OSError as error:
            self.problem = f"{self.where} cannot be read ({error.strerror or error})"
        except (ValueError, ValidationError) as error:
            what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "no JSON"
            self.problem = f"{self.where} is no rendezvous ({what})"
        else:
            if self.fleet_id and found.fleet_id not in ("", self.fleet_id):
                self.problem = f"{self.where} is of fleet {found.fleet_id!r}, not of {self.fleet_id!r}"
                return None
            self.at_goal = found.at_goal
            late_s = time.time() - found.expires_unix_s
            if late_s <= 0 or found.state == "stopped":
                how = "reached its goal" if found.at_goal else "has stopped"
                again = f"go on with `headrace up --resume RUN` on {found.host or 'its machine'}"
                stopped = f"fleet {found.fleet_id} of {self.where} {how}; {again}"
                self.problem = stopped if found.state == "stopped" else ""
                return found
            self.problem = (
                f"{self.where} expired {late_s:.0f} s ago: its broker has gone, or the clocks of the machines differ"
            )
        return None

    def find(self, role: str) -> str:
        """Return the address for peers of `role` now; "" while there is none."""
        found = self.look()
        if found is None or found.state == "stopped":
            return ""
        address = found.endpoints.get(role, "")
        if not address:
            self.problem = f"{self.where} names no address for {role}"
        elif is_elsewhere(address, found.host):
            self.problem = f"the broker of {self.where} serves {found.host} alone, at {address}; set broker.host there"
            return ""
        else:
            try:
                check_socket(address)
            except HeadraceError as error:
                self.problem = f"{self.where} names {address!r:.120}, which is not used: {error}"
                return ""
        return address

    def stopped(self) -> HeadraceError | None:
        """Return an error that says so, if the fleet has stopped."""
        found = self.look()
        if found is None or found.state != "stopped":
            return None
        return UnreachableError("fleet", self.where, 0.0, sentence=self.problem)


def is_elsewhere(address: str, host: str) -> bool:
    """Return whether only processes of another machine, `host`, reach this address."""
    return host not in ("", platform.node()) and (
        address.startswith("ipc:") or is_loopback(address.partition("://")[2].rpartition(":")[0].strip("[]"))
    )


@dataclass
class _Fetcher:
    """Fetches one URL in threads of its own, so that no caller waits for a web server."""

    url: str
    content: bytes = b""
    error: str = "no answer yet"
    thread: threading.Thread | None = None

    def newest(self) -> bytes:
        """Return the last answer, and ask again. Raises `OSError` if the last try failed."""
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._fetch, name="rendezvous", daemon=True)
            self.thread.start()
        if self.error:
            raise OSError(None, self.error)
        return self.content

    def _fetch(self) -> None:
        try:
            request = urllib.request.Request(self.url, headers={BY_PROGRAM: "1"})
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                self.content, self.error = answer.read(_LARGEST), ""
        except (OSError, HTTPException, ValueError) as error:
            self.error = str(error)[:200] or type(error).__name__
            if isinstance(error, HTTPError):
                error.close()  # it is the answer, with its connection


def _by_name(where: str, ports: Mapping[str, int], setting: str) -> Published:
    name = urlsplit(where).netloc
    if not name or any(letter in name for letter in "@:/?#") or urlsplit(where).path not in ("", "/"):
        _refuse(where, "should be dns://NAME, without a port")
    if not all(ports.values()):
        _refuse(where, f"needs {setting} in the settings: a name says no port")
    return Published(fleet_id="", endpoints={role: f"tcp://{name}:{port}" for role, port in ports.items()})


def _refuse(where: str, why: str) -> NoReturn:
    raise ConfigError(f"{why}, got {where!r:.120}", key="fleet.rendezvous")

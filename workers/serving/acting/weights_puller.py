"""The newest weights of a policy server, pulled piece by piece beside the acting."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from headrace.schemas.blobs import frames_of
from headrace.schemas.errors import DecodeError, HeadraceError, UnreachableError
from headrace.schemas.messages import Version
from headrace.schemas.serving_errors import UnknownSessionError
from headrace.schemas.serving_messages import ClientPart, ClientPull
from headrace.schemas.weights import Arrays, read_weights
from headrace.schemas.wire import decode
from headrace.workers.serving.client import PolicyClient

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PulledWeights:
    """One whole version."""

    version: Version
    digest: str
    arrays: Arrays


class WeightsPuller:
    """Looks for newer weights each `interval_s` in a thread of its own, from construction on."""

    def __init__(self, link: PolicyClient, interval_s: float) -> None:
        self._link = link
        self._interval_s = interval_s
        self._newest: PulledWeights | None = None
        self._version: Version = (0, 0)
        self._blob = bytearray()
        self._stopping = threading.Event()
        self.arrived = threading.Event()
        """Set once there are any, or none will ever come."""
        self.failure: HeadraceError | None = None
        """Why none come any more."""
        self.session_lost = threading.Event()
        """Set when the session has ended, which nobody else may notice for long; cleared by who opens another."""
        self._thread = threading.Thread(target=self._pull, name="weights", daemon=True)
        self._thread.start()

    def take(self) -> PulledWeights | None:
        """What came since the last call."""
        newest, self._newest = self._newest, None
        return newest

    def stop(self) -> None:
        """Pull no more; waits for the request that is under way."""
        self._stopping.set()
        self._thread.join()

    def _pull(self) -> None:
        refused = ""
        while not self._stopping.is_set():
            session = self._link.session
            try:
                while self._ask() and not self._stopping.is_set():
                    pass
            except UnknownSessionError:
                # Twice, and still: the first time another may just be opened by who knows already.
                if refused == session == self._link.session:
                    self.session_lost.set()
                refused = session
            except UnreachableError as error:
                log.warning("%s; acting by the weights there are", error)
            except HeadraceError as error:
                self.failure = error
                self.arrived.set()
                return
            self._stopping.wait(self._interval_s)

    def _ask(self) -> bool:
        """Ask for the next piece; whether there is more to ask for."""
        part, arrays = self._link.ask(ClientPull, timeout_s=10.0, version=self._version, offset=len(self._blob))
        if not isinstance(part, ClientPart) or "part" not in arrays or sum(part.frame_sizes) > _MOST_BYTES:
            raise DecodeError("bad_message", f"{type(part).__name__} is no piece of weights that a client could take")
        piece = arrays["part"].tobytes()
        if not piece:
            return False
        if (part.version, part.offset) != (self._version, len(self._blob)):
            self._version, self._blob = part.version, bytearray()
        self._blob += piece
        size = sum(part.frame_sizes)
        if len(self._blob) == size:
            self._read(part)
        return len(self._blob) < size

    def _read(self, part: ClientPart) -> None:
        header, arrays = read_weights(decode(frames_of(bytes(self._blob), part.frame_sizes)))
        self._newest = PulledWeights(header.version, header.digest, arrays)
        self.arrived.set()

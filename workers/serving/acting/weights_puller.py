"""Pulls the newest weights of a policy server piece by piece, in a thread of its own."""

from __future__ import annotations

import logging
import threading

from headrace.schemas.basics.bounds import Version
from headrace.schemas.errors import DecodeError, HeadraceError, UnreachableError
from headrace.schemas.errors.serving import UnknownSessionError
from headrace.schemas.frames.wire import decode, frames_of
from headrace.schemas.messages.weights import MOST_WEIGHTS_BYTES, WeightsVersion, read_weights
from headrace.workers.serving.client import PolicyClient
from headrace.workers.serving.serving_messages import ClientPart, ClientPull

log = logging.getLogger(__name__)


class WeightsPuller:
    """Asks for newer weights every `interval_s`, from its construction until `stop`."""

    def __init__(self, link: PolicyClient, interval_s: float) -> None:
        self._link = link
        self._interval_s = interval_s
        self._newest: WeightsVersion | None = None
        self._version: Version = (0, 0)
        self._blob, self._have = bytearray(), 0
        self._stopping = threading.Event()
        self.arrived = threading.Event()
        """Set when the first weights have come, or when none will ever come."""
        self.failure: HeadraceError | None = None
        """The error that ended the puller."""
        self.session_lost = threading.Event()
        """Set when the session has ended. The client, which may notice it much later, clears it with a new session."""
        self._thread = threading.Thread(target=self._pull, name="weights", daemon=True)
        self._thread.start()

    def take(self) -> WeightsVersion | None:
        """Return the newest weights that came since the last call, or None."""
        newest, self._newest = self._newest, None
        return newest

    def stop(self) -> None:
        """Stop the thread. Waits for the request that is under way."""
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
                # Only the second refusal counts: at the first, the client may just be opening another session.
                if refused == session == self._link.session:
                    self.session_lost.set()
                refused = session
            except UnreachableError as error:
                log.warning("%s; the client goes on with the weights it has", error)
            except HeadraceError as error:
                self.failure = error
                self.arrived.set()
                return
            self._stopping.wait(self._interval_s)

    def _ask(self) -> bool:
        """Ask for the next piece. Return whether more pieces of the version remain."""
        part, arrays = self._link.ask(ClientPull, timeout_s=10.0, version=self._version, offset=self._have)
        if not isinstance(part, ClientPart) or "part" not in arrays or sum(part.frame_sizes) > MOST_WEIGHTS_BYTES:
            raise DecodeError("bad_message", f"{type(part).__name__} is no piece of weights that a client can take")
        piece = arrays["part"].tobytes()
        if not piece:
            return False
        if (part.version, part.offset) != (self._version, self._have):
            self._version, self._blob, self._have = part.version, bytearray(), 0
        self._blob += piece
        self._have += len(piece)
        size = sum(part.frame_sizes)
        if self._have == size:
            blob, self._blob = self._blob, bytearray()  # the arrays are views of it
            header, weights = read_weights(decode(frames_of(blob, part.frame_sizes)))
            self._newest = WeightsVersion(header.version, header.digest, weights)
            self.arrived.set()
        return self._have < size

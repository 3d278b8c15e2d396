"""The thread of a user's `run()`, which drives episodes."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from headrace.schemas.errors.episodes import RunReturnedError
from headrace.workers.envs.lane import close_envs
from headrace.workers.external.self_driven import SelfDrivenEnv

logger = logging.getLogger(__name__)


class RunThread:
    """The thread of an env that is attached to a table. Once `run()` has ended, the table accepts nothing more."""

    def __init__(self, env: SelfDrivenEnv[Any]) -> None:
        self.env = env
        self._error: BaseException = RunReturnedError(type(env).__name__)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"run-{type(env).__name__}", daemon=True)

    def start(self) -> None:
        """Start the thread, which calls `run()`."""
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended `run()`; None while it goes on."""
        return self._error if self._ended.is_set() else None

    def _run(self) -> None:
        try:
            self.env.run()
        except Exception as error:  # noqa: BLE001 - a user's env
            self._error = error
        finally:
            # Close first: when the sampler sees the failure, the table already has all earlier calls.
            self.env.episodes.close(f"run() of the env has ended ({type(self._error).__name__}: {self._error})")
            self._ended.set()

    def stop(self, timeout_s: float) -> None:
        """Close the env so that `run()` ends. Wait at most `timeout_s` seconds, because a thread cannot be killed."""
        deadline = time.monotonic() + timeout_s
        self.env.episodes.close("the env was closed")
        self.env.episodes.release_all()
        close_envs([self.env], timeout_s)
        if self._thread.ident is not None:
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            logger.warning(
                "%s did not end within %g s; it is abandoned, and all it may ask for is refused",
                self._thread.name,
                timeout_s,
            )

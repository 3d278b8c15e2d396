"""The best checkpoint by training: that of the highest mean return over a full window of episodes."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from headrace.learner_stub.checkpoints.checkpoint import hold_checkpoint, keep_best
from headrace.learner_stub.reference.training_stats import RECENT_EPISODES
from headrace.schemas.errors import CheckpointError, RunDirError

log = logging.getLogger("headrace.learner")

BEST_FILE = "best.checkpoint"


class BestCheckpoint:
    """Keeps `best.checkpoint` beside the learner's checkpoint at `path`. A later life of the learner goes on with it.

    The best checkpoint is a second name of the saved file, so it is as complete as that file. A replaced learner keeps
    no checkpoint: it first checks that the checkpoint at `path` is of its own epoch.
    """

    def __init__(self, path: Path, epoch: int) -> None:
        self._path, self._epoch = path, epoch
        self._best = path.with_name(BEST_FILE)
        self._held = path.with_name(f"{BEST_FILE}.{os.getpid()}.new")
        self._highest = self._read_highest()
        self._doubt = ""

    def saved(self, mean_return: float | None, doubt: str = "") -> None:
        """Take note that the learner has saved its checkpoint. `mean_return` is that of a full window, if there is one.

        With a `doubt` about it the best one stays, which the log says once. A failure to keep the best is logged: the
        learner's own checkpoint is written, and training goes on.
        """
        if mean_return is None or mean_return <= self._highest:
            return
        if doubt:
            if not self._doubt:
                log.warning("a mean return of %.4g makes no best checkpoint: %s", mean_return, doubt)
            self._doubt = doubt
            return
        try:
            checkpoint = hold_checkpoint(self._path, self._held)
            if checkpoint is not None and checkpoint.epoch == self._epoch:
                keep_best(self._held, self._best)
                self._highest = mean_return
        except (CheckpointError, RunDirError) as error:
            log.warning("the best checkpoint is not kept: %s", error)
        finally:
            self._held.unlink(missing_ok=True)

    def _read_highest(self) -> float:
        """Return the mean return of the existing best checkpoint, from its window; minus infinity if there is none."""
        try:
            saved = hold_checkpoint(self._best, self._held)
        except (CheckpointError, RunDirError) as error:
            log.warning("the best checkpoint so far is dropped: %s", error)
            saved = None
        finally:
            self._held.unlink(missing_ok=True)
        return -math.inf if saved is None else _window_mean(saved.state)


def _window_mean(state: dict[str, Any]) -> float:
    """Return what `LearnerPolicies.window_mean` was when `state` was saved; the lowest number for another state."""
    means = []
    for own in state.get("modules", {"": state}).values():
        if own.get("frozen"):
            continue
        returns = own.get("recent_returns", ())
        if len(returns) < RECENT_EPISODES:
            return -math.inf
        means.append(float(np.mean(returns)))
    return sum(means) / len(means) if means else -math.inf

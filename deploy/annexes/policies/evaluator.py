"""`headrace evaluate RUN --watch`: evaluates the checkpoints of a run while it trains, and keeps the best one.

It reads the learner's checkpoint and joins no fleet: nothing that it plays is counted, sent or trained on.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.deploy.annexes.policies.evaluation import Evaluation, PlaySettings
from headrace.deploy.run.checkpoint_facts import BEST_FILE, NEWEST_FILE, counts_of
from headrace.deploy.run.evaluation_log import EvaluationLog, describe, doubt_of
from headrace.learner_stub.checkpoints.checkpoint import Checkpoint, hold_checkpoint, keep_best, published_arrays
from headrace.schemas.errors import CheckpointError, writing
from headrace.schemas.settings.config import FleetConfig
from headrace.workers.fleet.user_side import envs_apart

log = logging.getLogger("headrace.deploy")

_LOOK_S = 0.5
_DEFAULT_SEED = 0
EPISODES = 10
"""Whole episodes of one evaluation."""


def watch(
    config: FleetConfig, run_dir: Path, num_envs: int | None, seed: int | None, stopping: threading.Event
) -> None:
    """Evaluate a checkpoint each time `learner.evaluate_every_steps` more steps were trained on, until `stopping`.

    A slow evaluation delays the next one, which then takes the newest checkpoint. All play the same episodes,
    by seed. Raises the errors of `Evaluation`.
    """
    seed = next(given for given in (seed, config.sampling.seed, _DEFAULT_SEED) if given is not None)
    settings = PlaySettings(EPISODES, num_envs, seed)
    with envs_apart() as calls, Evaluation(config, settings, calls=calls) as evaluation:
        learner = config.learner
        watcher = _Watcher(run_dir, learner.evaluate_every_steps, evaluation, learner.policies_to_train or [])
        while not stopping.wait(_LOOK_S):
            watcher.look(stopping)


class _Watcher:
    def __init__(self, run_dir: Path, every: int, evaluation: Evaluation, trained: list[str]) -> None:
        self._every, self._evaluation, self._trained = every, evaluation, trained
        self._newest, self._best = run_dir / NEWEST_FILE, run_dir / BEST_FILE
        self._held = run_dir / f"evaluating.{os.getpid()}.checkpoint"
        self._log = EvaluationLog(run_dir)
        before = self._log.take_new()
        self._evaluated_steps = before[-1]["steps"] if before else 0
        self._best_mean = max((mean_return(told, trained) for told in before if not doubt_of(told)), default=-math.inf)
        self._seen_at_ns = 0
        with writing(run_dir):
            for left in run_dir.glob("evaluating.*.checkpoint"):  # left by a killed process
                left.unlink(missing_ok=True)

    def look(self, stopping: threading.Event) -> None:
        """Evaluate the newest checkpoint if it is due."""
        try:
            changed_at_ns = self._newest.stat().st_mtime_ns
        except FileNotFoundError:  # no checkpoint yet, or the learner is replacing it
            return
        if changed_at_ns == self._seen_at_ns:
            return
        self._seen_at_ns = changed_at_ns
        try:
            checkpoint = hold_checkpoint(self._newest, self._held)
            if checkpoint is not None and counts_of(checkpoint.state).steps >= self._evaluated_steps + self._every:
                self._evaluate(checkpoint, stopping)
        except CheckpointError as error:
            log.warning("%s", error)
        finally:
            with suppress(OSError):  # the folder cannot be written to
                self._held.unlink(missing_ok=True)

    def _evaluate(self, checkpoint: Checkpoint, stopping: threading.Event) -> None:
        counts, began = counts_of(checkpoint.state), time.monotonic()
        arrays = published_arrays(checkpoint.arrays)
        scores = self._evaluation.play(arrays, (checkpoint.epoch, counts.updates), stopping)
        if not scores.complete:
            return
        told = {
            "unix_s": round(time.time(), 3),
            "steps": counts.steps,
            "update": counts.updates,
            "learner_epoch": checkpoint.epoch,
            **scores.as_json(),
            "seconds": round(time.monotonic() - began, 3),
        }
        mean = mean_return(told, self._trained)
        told["best"] = mean > self._best_mean and not doubt_of(told)
        if told["best"]:
            keep_best(self._held, self._best)
            self._best_mean = mean
        self._evaluated_steps = counts.steps
        self._log.append(told)
        log.info("evaluated: %s", describe(told))


def mean_return(told: Mapping[str, Any], trained: list[str]) -> float:
    """Return the mean return of an evaluation: that of `trained` policies together, if it tells of any of these."""
    by_policy = told.get("return_by_policy", {})
    own = [by_policy[policy]["mean"] for policy in trained if policy in by_policy]
    return float(sum(own) if own else told["return"]["mean"])

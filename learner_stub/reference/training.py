"""The learner process: gather batches, train, checkpoint, commit, publish.

The learner commits a batch only after the checkpoint has it. So all steps that a killed learner had not written come
again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.learner_stub.checkpoints.checkpoint import CHECKPOINT_FILE, Checkpoint, load_checkpoint, save_checkpoint
from headrace.learner_stub.publishing.publisher import WeightPublisher, array_views, check_finite
from headrace.learner_stub.reference.best_checkpoint import BestCheckpoint
from headrace.learner_stub.reference.policies import LearnerPolicies, build_policies
from headrace.learner_stub.reference.training_stats import Metrics
from headrace.learner_stub.rollouts.interruption import AbandonedUpdateError, StopDeadline, do_nothing
from headrace.learner_stub.streaming.stream import EpisodeStream
from headrace.schemas.accounts.aborted_episodes import doubt
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.credentials.keys import client_keys
from headrace.schemas.errors import CheckpointError, ConnectorError, ModuleError, NotFiniteError, UnreachableError
from headrace.schemas.peers.fleet_address import AddressSource
from headrace.schemas.peers.fleet_place import broker_fleet_id
from headrace.schemas.settings.config import FleetConfig

log = logging.getLogger("headrace.learner")

_LOG_INTERVAL_S = 1.0
_WAIT_S = 0.2
"""Seconds of one wait for a batch. A learner that is stopped waits as long for a last one."""
_LOOK_S = 0.02
"""Interval at which such a wait looks for a stop signal, and whether no batch is left to come."""

_SHORT_S, _FINISH_S = 5.0, 10.0
"""Seconds after a stop signal for which an update goes on, and for which further, short ones may begin while batches
come.
"""
_SAY_WAITING_S = 10.0
_FROM_THE_START = (
    "if a learner of your own wrote it, start that one again; to train from the start move it away and start with "
    "--set redis.bytes_per_hour=0, as Redis may have a copy"
)


def train(
    policies: LearnerPolicies,
    steps_per_update: int,
    stream: EpisodeStream,
    weights: WeightPublisher,
    checkpoint: Path,
    stopping: threading.Event,
    best: BestCheckpoint | None = None,
    *,
    synchronous: bool = False,
    alive: Callable[[], None] = do_nothing,
    on_batch: Callable[[], None] = do_nothing,
) -> None:
    """Train update after update until `stopping` is set. Returns with all it trained on checkpointed and committed.

    Once stopping it still trains on what was sampled already, for a few seconds at most; then an update under way ends
    with the minibatches that are done. Where sampling is synchronous, an update is trained on whole or not at all, and
    none begins once stopping: so the weights after n updates are always the same. Raises `AbandonedUpdateError` for an
    update that is broken off uncommitted: its steps come again, and `policies` must not be used any more.

    A kill at any line loses nothing: steps that are not yet in the checkpoint are not committed either and come again.
    Steps in it but not committed are known by its position and not trained on twice.

    `best` keeps the best checkpoint by the mean return in training. `alive` is called between the parts of an update
    and while it waits, as a sign of life, and `on_batch` for each batch that has come.
    """
    save_checkpoint(checkpoint, _snapshot(policies, stream), claim=True)
    weights.publish(policies.weights(), allow_non_finite=True)
    meant = {name for name, array in array_views(policies.weights()).items() if not _finite(array)}
    progress = ProgressLog()
    deadline = StopDeadline(stopping, _SHORT_S, _FINISH_S, whole=synchronous, alive=alive)
    while not deadline.has_passed:
        batches = gather(stream, steps_per_update, stopping, alive, whole=synchronous, on_batch=on_batch)
        if not batches:
            return
        metrics = policies.update(batches, deadline) | staleness(batches)
        try:
            _check_finite(policies, meant, metrics)
        except ModuleError:
            weights.log(metrics)
            raise
        save_checkpoint(checkpoint, _snapshot(policies, stream))
        stream.commit()
        weights.publish(policies.weights(), allow_non_finite=True)
        if best is not None:
            best.saved(policies.window_mean, doubt(*policies.ends.counts))
        weights.log(metrics)
        progress.report(metrics)
        if synchronous and stopping.is_set():
            return


def _check_finite(policies: LearnerPolicies, meant: Container[str], metrics: Metrics) -> None:
    """Raise `ModuleError` for weights that an update made NaN or infinite. Those `meant` were so from the start."""
    arrays = array_views(policies.weights())
    try:
        check_finite({name: array for name, array in arrays.items() if name not in meant})
    except NotFiniteError as error:
        losses = ", ".join(f"{name} = {value:.4g}" for name, value in metrics.items() if "loss" in name)
        raise ModuleError(
            f"update {policies.updates} has made weights that are not finite ({losses or 'no loss'}): {error.bad:,} of "
            f"{error.size:,} values of {error.name!r:.200}; the checkpoint stays that of the update before: lower "
            "learner.learning_rate or learner.max_grad_norm, look at the size of rewards, and go on from it"
        ) from None


def _finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def gather(
    stream: EpisodeStream,
    steps: int,
    stopping: threading.Event,
    alive: Callable[[], None] = do_nothing,
    *,
    whole: bool = False,
    on_batch: Callable[[], None] = do_nothing,
) -> list[ChunkBatch]:
    """Gather batches of `steps` steps or more together, the last one whole.

    Blocks until then, or, once `stopping` is set, until nothing more comes. Returns fewer steps where workers have no
    room for as many, since the rest would never come, and logs it. With `whole`, returns none where stopping leaves
    less than an update.

    All steps of all modules count, also those of modules that are not trained: workers wait for their commit too. A
    module that gets no data keeps no other waiting.
    """
    batches: list[ChunkBatch] = []
    missing = steps
    while missing > 0:
        alive()
        batch = _next(stream, stopping)
        if batch is not None:
            on_batch()
            batches.append(batch)
            missing -= batch.steps
        elif stopping.is_set():
            return [] if whole else batches
        elif batches and stream.starved:
            log.warning("every worker waits for a commit: an update on %d steps instead of %d", steps - missing, steps)
            break
    return batches


def _next(stream: EpisodeStream, stopping: threading.Event) -> ChunkBatch | None:
    """Return the next batch, or None after `_WAIT_S`. None at once if the learner is stopped and no batch can come."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        batch = stream.next(timeout_s=_LOOK_S)
        left = not (stopping.is_set() and stream.exhausted)
        if batch is not None or not left or time.monotonic() >= deadline:
            return batch


def staleness(batches: Sequence[ChunkBatch]) -> Metrics:
    """Return mean and maximum of the lag of all steps. Empty if an earlier learner's weights chose them."""
    lags = [batch.lag for batch in batches if batch.learner_epoch == batch.newest[0] and batch.steps]
    if not lags:
        return {}
    behind = np.concatenate(lags)
    return {"staleness": float(behind.mean()), "staleness_max": float(behind.max())}


def _snapshot(policies: LearnerPolicies, stream: EpisodeStream) -> Checkpoint:
    state, arrays = policies.get_state()
    return Checkpoint(stream.epoch, stream.position(), state, arrays)


class ProgressLog:
    """Writes a line about training to the log now and then."""

    def __init__(self) -> None:
        self._due = time.monotonic()

    def report(self, metrics: Metrics) -> None:
        """Log `metrics`, at most once a second."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _LOG_INTERVAL_S
            log.info("%s", " ".join(f"{name}={value:.4g}" for name, value in metrics.items()))


def run_learner(
    config: FleetConfig,
    *,
    endpoint: str | Sequence[str],
    run_dir: Path,
    alive: Callable[[], None] = do_nothing,
    on_batch: Callable[[], None] = do_nothing,
    source: AddressSource | Sequence[AddressSource] | None = None,
) -> None:
    """Run the learner process: go on from the checkpoint in `run_dir`, or begin.

    Returns after SIGTERM; raises `StoppedError` where no broker had answered before it. Main thread only. `alive` is
    called often, as a sign of life, and `on_batch` for each batch.
    `source` names the broker's new address if it moves. For several brokers `endpoint` and `source` are lists.

    Raises `ConfigError` and `ModuleError` for the modules, `ConnectorError` for their connectors, `CheckpointError`,
    `FencedError` when another learner takes over, and the errors of `EpisodeStream` about the broker.
    """
    torch.set_num_threads(config.learner.torch_threads)
    torch.manual_seed(config.learner.seed)  # for modules that draw their first weights from torch's own generator
    fleet_id = config.fleet.fleet_id
    path = run_dir / CHECKPOINT_FILE
    saved = load_checkpoint(path)
    brokers = 1 if isinstance(endpoint, str) else len(endpoint)
    position = _position_in({broker_fleet_id(fleet_id, index, brokers) for index in range(brokers)}, saved)
    place: dict[str, Any] = {
        "fleet_id": fleet_id,
        "keys": client_keys(config.keys.dir, "learner", config.keys.group) or "",
        "rendezvous": source,
        "connect_timeout_s": config.worker.connect_timeout_s,
    }
    with (
        stop_event() as stopping,
        EpisodeStream(
            endpoint,
            position=position,
            auto_commit=False,
            steps_per_update=config.learner.steps_per_update,
            synchronous=config.sampling.synchronous,
            **place,
        ) as stream,
        WeightPublisher(endpoint, **place) as weights,
    ):
        spaces = _first_spaces(stream, stopping, alive)
        if spaces is None:
            return
        policies = build_policies(config, spaces)
        if saved:
            _resume(policies, saved, path)
        best = None if config.learner.evaluate_every_steps else BestCheckpoint(path, stream.epoch)
        steps, synchronous = config.learner.steps_per_update, config.sampling.synchronous
        try:
            train(
                policies,
                steps,
                stream,
                weights,
                path,
                stopping,
                best,
                synchronous=synchronous,
                alive=alive,
                on_batch=on_batch,
            )
        except AbandonedUpdateError as error:
            log.warning("%s; its steps stay uncommitted, and the checkpoint is that of the update before", error)
            return
    log.info("stopped after update %d, trained on %d steps", policies.updates, policies.steps)


def _position_in(fleet_ids: set[str], saved: Checkpoint | None) -> list[dict[str, Any]]:
    """Return the stream's position in the checkpoint, if it is of this fleet, whose brokers have these ids.

    In another fleet the same numbers mean other batches.
    """
    position = saved.position if saved else []
    if fleet_ids != {""} and any(place.get("fleet_id") not in (None, *fleet_ids) for place in position):
        log.warning(
            "the checkpoint was written in another fleet: going on with its model, and training on all batches here"
        )
        return []
    return position


def _first_spaces(
    stream: EpisodeStream, stopping: threading.Event, alive: Callable[[], None]
) -> dict[str, Spaces] | None:
    """Wait for the spaces of the fleet's modules, however long the first worker takes. None once `stopping` is set."""
    next_word = time.monotonic()
    while not stopping.is_set():
        alive()
        if time.monotonic() >= next_word:
            next_word += _SAY_WAITING_S
            log.info("waiting for the first worker at %s", stream.endpoint)
        try:
            return stream.module_spaces(timeout_s=_WAIT_S)
        except UnreachableError:
            continue
    return None


def _resume(policies: LearnerPolicies, saved: Checkpoint, path: Path) -> None:
    try:
        policies.set_state(saved.state, saved.arrays)
    except (ConnectorError, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(str(path), f"it does not fit the modules ({error})", _FROM_THE_START) from error
    log.info("going on from %s: update %d, %d steps", path, policies.updates, policies.steps)

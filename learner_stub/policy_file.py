"""Checkpoints of a learner of one's own: weights in the form that `headrace evaluate` and `load_policy` read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.learner_stub.checkpoint import (
    CHECKPOINT_FILE,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
    stored_arrays,
)
from headrace.learner_stub.publisher import StateDict, as_arrays
from headrace.schemas.errors import CheckpointError


def save_policy(
    run_dir: str | Path,
    state_dict: StateDict | Mapping[str, StateDict],
    *,
    updates: int = 0,
    steps: int = 0,
    epoch: int | None = None,
) -> Path:
    """Save weights as RUN_DIR/learner.checkpoint, and return its path. Blocks until the file is on disk.

        save_policy("runs/mine", module.state_dict(), updates=20)

    `headrace evaluate`, `export` and `serve` read the file, and `load_policy` too. They build the module by the
    config.json that `headrace up` wrote beside it. The checkpoint before is kept as learner.checkpoint.previous.

    - state_dict: as for `WeightPublisher.publish`, with state of connectors beside the tensors, if there is any.
    - updates, steps: how far training has come, for people and for `learner.evaluate_every_steps`.
    - epoch: the stream's epoch, by which a replaced learner cannot undo its successor's work. None: the epoch of the
      existing file.

    The file has no optimizer and no position in the stream, so the reference learner cannot go on from it.

    Raises `EncodeError` for a tensor that no file can hold, `FencedError` where a learner of a higher epoch has
    written there, and `RunDirError` when the folder cannot be written to.
    """
    path = Path(run_dir) / CHECKPOINT_FILE
    arrays = stored_arrays(as_arrays(state_dict))
    epoch = _epoch_of(path) if epoch is None else epoch
    save_checkpoint(path, Checkpoint(epoch, [], {"updates": updates, "steps": steps}, arrays))
    return path


def _epoch_of(path: Path) -> int:
    try:
        saved = load_checkpoint(path)
    except CheckpointError:
        return 1  # it is replaced
    return saved.epoch if saved is not None else 1

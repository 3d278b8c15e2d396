"""The state of a learner of one's own: saved in one file, and loaded by its next life; or its weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from numpy.typing import NDArray

from headrace.learner_stub.checkpoints.checkpoint import (
    CHECKPOINT_FILE,
    OWN,
    Checkpoint,
    load_checkpoint,
    published_arrays,
    save_checkpoint,
    stored_arrays,
)
from headrace.learner_stub.checkpoints.state_tree import pack, unpack
from headrace.learner_stub.link.fleet_place import await_start
from headrace.learner_stub.publishing.publisher import StateDict, as_arrays
from headrace.learner_stub.streaming.stream import EpisodeStream
from headrace.schemas.basics.bounds import TRAIN
from headrace.schemas.errors import CheckpointError, ConfigError, DecodeError, absolute
from headrace.schemas.messages.weights import CONNECTORS, split_modules

_TREE = "own"
"""The entry of a checkpoint's state with the learner's own values."""


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state that an earlier life of the learner saved.

    - policy: as it was given: name -> tensor, or module id -> {name -> tensor}. State of connectors is arrays.
    - position: for `EpisodeStream`.
    - updates, steps: as they were given.
    - more: all further values, by the names under which they were given.
    """

    policy: dict[str, Any]
    position: list[dict[str, Any]]
    updates: int = 0
    steps: int = 0
    more: dict[str, Any] = field(default_factory=dict)


class LearnerState:
    """The file learner.checkpoint in `folder`, in which a learner of one's own keeps all that its next life needs.

        state = LearnerState.of("runs/mine")
        saved = state.load()  # None in the first life

    The fleet keeps a copy in Redis, and puts it back before a start if the run directory was lost. `folder` without a
    fleet, as on another machine, has no copy. `save` makes the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self._path = absolute(folder) / CHECKPOINT_FILE
        self._found: object = _identity(self._path)
        """The file that the first save takes over whatever its epoch, as of a fleet whose epochs were lost."""

    @classmethod
    def of(cls, run_dir: str | Path, *, connect_timeout_s: float = 60.0) -> Self:
        """Return the state of the learner of the fleet in `run_dir`.

        Waits up to `connect_timeout_s` until the fleet runs: before that the run directory may lack a checkpoint that
        Redis has. Raises `UnreachableError`.
        """
        await_start(Path(run_dir), connect_timeout_s)
        return cls(run_dir)

    def save(
        self,
        stream: EpisodeStream,
        policy: StateDict | Mapping[str, StateDict],
        *,
        updates: int = 0,
        steps: int = 0,
        allow_non_finite: bool = False,
        **more: Any,
    ) -> Path:
        """Save everything, with the position of `stream`, and return the path. Blocks until the file is on disk.

            state.save(stream, module.state_dict(), optimizer=optimizer.state_dict(), updates=7)

        Call it before `stream.commit()`. Everything that was handed out counts as trained on.

        - policy: as for `WeightPublisher.publish`. `headrace evaluate` and `load_policy` read it.
        - updates, steps: how far training has come.
        - more: tensors, arrays, numbers, text, and dicts, lists and tuples of these: state dicts of optimizers and
          schedulers, states of random generators.

        Raises `NotFiniteError` for a policy that `WeightPublisher.publish` refuses, so that the last finite one stays;
        `allow_non_finite` is as there. Raises `EncodeError` for a value that no file can hold, `FencedError` where a
        learner of a higher epoch has written there, and `RunDirError` when the folder cannot be written to. Raises
        `WeightsMismatchError` and `ModuleError` for a policy that does not fit the module that the workers of this
        folder's run have told of, or else that of the file before. Raises `ConfigError` where the folder is a run
        directory, and `stream` reads for another group than the learner's.
        """
        if stream.group != TRAIN and (self._path.parent / "broker.json").exists():
            detail = f"{self._path} is the learner's; save the state of group {stream.group!r} in another folder"
            raise ConfigError(detail, key="group")
        tree, own = pack(more, OWN)
        arrays = {**stored_arrays(as_arrays(policy, allow_non_finite=allow_non_finite)), **own}
        state = {"updates": updates, "steps": steps, _TREE: tree}
        checkpoint = Checkpoint(stream.epoch, stream.position(), state, arrays)
        with suppress(OSError):  # what is wrong with the folder, the save says
            self._path.parent.mkdir(parents=True, exist_ok=True)
        # Of another file, as a successor's, the epoch decides.
        save_checkpoint(self._path, checkpoint, claim=self._found == _identity(self._path))
        self._found = "saved"
        return self._path

    def load(self) -> LoadedState | None:
        """Return the state that was saved last, in its own memory; None if none was saved.

        A file of `save_policy` or of the reference learner has no further values. Raises `CheckpointError` for a
        damaged file without a whole one before it.
        """
        saved = load_checkpoint(self._path)
        if saved is None:
            return None
        try:
            more = unpack(saved.state.get(_TREE, {}), saved.arrays)
        except DecodeError as error:
            raise CheckpointError(str(self._path), error.detail) from error
        if not isinstance(more, dict):
            raise CheckpointError(str(self._path), "the learner's own values in it are no dict")
        counts = {name: count for name in ("updates", "steps") if type(count := saved.state.get(name)) is int}
        return LoadedState(_policy(published_arrays(saved.arrays)), saved.position, more=more, **counts)


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        return (status := path.stat()).st_ino, status.st_mtime_ns
    return None


def _policy(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    by_module = split_modules(arrays)
    if by_module is not None:
        return {module_id: _policy(own) for module_id, own in by_module.items()}
    copies = {name: array.copy() for name, array in arrays.items()}  # those of a file are read-only
    return {name: array if name.startswith(CONNECTORS) else torch.from_numpy(array) for name, array in copies.items()}


def save_policy(
    run_dir: str | Path,
    state_dict: StateDict | Mapping[str, StateDict],
    *,
    updates: int = 0,
    steps: int = 0,
    epoch: int | None = None,
    allow_non_finite: bool = False,
) -> Path:
    """Save weights as RUN_DIR/learner.checkpoint, and return its path. Blocks until the file is on disk.

        save_policy("runs/mine", module.state_dict(), updates=20)

    `headrace evaluate`, `export` and `serve` read the file, and `load_policy` too. They build the module by the
    config.json that `headrace up` wrote beside it. The checkpoint before is kept as learner.checkpoint.previous.

    - state_dict: as for `WeightPublisher.publish`, with state of connectors beside the tensors, if there is any.
    - updates, steps: how far training has come, for people and for `learner.evaluate_every_steps`.
    - epoch: the stream's epoch, by which a replaced learner cannot undo its successor's work. None: the epoch of the
      existing file.
    - allow_non_finite: as for `WeightPublisher.publish`, whose checks are made here too.

    The file has no optimizer and no position in the stream, so the reference learner cannot go on from it.

    Raises `NotFiniteError`, `EncodeError` for a tensor that no file can hold, `FencedError` where a learner of a higher
    epoch has written there, and `RunDirError` when the folder cannot be written to. Raises `WeightsMismatchError` and
    `ModuleError` for weights that do not fit, as `LearnerState.save`. All of them leave the checkpoint as it is.
    """
    path = absolute(run_dir) / CHECKPOINT_FILE
    arrays = stored_arrays(as_arrays(state_dict, allow_non_finite=allow_non_finite))
    epoch = _epoch_of(path) if epoch is None else epoch
    save_checkpoint(path, Checkpoint(epoch, [], {"updates": updates, "steps": steps}, arrays))
    return path


def _epoch_of(path: Path) -> int:
    try:
        saved = load_checkpoint(path)
    except CheckpointError:
        return 1  # it is replaced
    return saved.epoch if saved is not None else 1

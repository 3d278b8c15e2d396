"""The learner's checkpoint: one file, written whole or not at all, read without running any of its bytes.

It is a safetensors file with a checksum (`schemas/frames/safetensors.py`):

    arrays      "module/..." weights, "optimizer/..." moments, "connectors/..." what connectors have learnt; of several
                modules, each name begins with "modules/MODULE_ID/"; "own/..." of a learner of one's own
    metadata    "headrace": JSON of epoch, saves (how many saves there were, over all epochs), position in the stream,
                and state (counters, newest returns)

Of two checkpoints of a fleet the one with the higher (epoch, saves) is newer. The supervisor keeps a copy of the newest
one in Redis (`deploy/fleet/checkpoint_copy.py`).

A new checkpoint is written beside the old one, flushed to disk, and moved into its place. The old one is kept as
`<name>.previous`. So a `kill -9` at any moment leaves at least one whole file.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from numpy.typing import NDArray

from headrace.schemas.basics.bounds import MOST_EPOCH, MOST_WEIGHTS_SEQ
from headrace.schemas.basics.run_files import opener, read_object, read_regular, sync_folder
from headrace.schemas.chunks.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.errors import (
    CheckpointError,
    DecodeError,
    FencedError,
    ModuleError,
    WeightsMismatchError,
    is_there,
    reading,
    write_error,
    writing,
)
from headrace.schemas.frames.manifest import Buffer
from headrace.schemas.frames.safetensors import decode_safetensors, encode_safetensors
from headrace.schemas.messages import kind_of
from headrace.schemas.messages.weights import CONNECTORS, check_shapes, fit_published, join_modules, split_modules

log = logging.getLogger("headrace.learner")

CHECKPOINT_FILE = "learner.checkpoint"
"""Name of the newest checkpoint in a run directory."""
_HEADER = "headrace"
"""The entry of the file's metadata."""
MODULE = "module/"
"""Prefix of the names of a module's weights, which stand beside those of its optimizer."""
OWN = "own/"
"""Prefix of the names of arrays that only a learner of one's own knows."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state from which a learner goes on.

    - epoch: of the learner that wrote it.
    - position: from `EpisodeStream.position()`, including all batches that were trained on.
    - state: plain JSON values (counters, learning rate).
    - arrays: module and optimizer tensors by name.
    - saves: its number among all saves of the run; `save_checkpoint` counts. 0: of a file that does not say.
    """

    epoch: int
    position: list[dict[str, Any]]
    state: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    saves: int = 0


def previous_path(path: Path) -> Path:
    """Return the path of the checkpoint before the one at `path`."""
    return path.with_name(path.name + ".previous")


def save_checkpoint(path: Path, checkpoint: Checkpoint, *, claim: bool = False) -> None:
    """Replace the checkpoint at `path`, which becomes the previous one. Blocks until the new one is on disk.

    Raises `FencedError` when a learner of a higher epoch has written there: a learner that slept while another took its
    place must not undo the other's work. Raises `RunDirError` when the folder cannot be written to, and `ModuleError`
    for weights that do not fit the run's module. All of these leave the checkpoint as it is.

    `claim` writes in any case, and removes half-written files of killed learners. A learner that starts uses it to take
    over any checkpoint, even from a fleet whose epochs were lost.
    """
    newest = _whole(path)
    before = newest or (_whole(previous_path(path)) if claim else None)
    _check_fits(path, published_arrays(checkpoint.arrays), before)
    if claim:
        with writing(path.parent, "the checkpoint"):
            for orphan in path.parent.glob(f"{path.name}.*.new"):
                orphan.unlink(missing_ok=True)
    elif before is not None and before.epoch > checkpoint.epoch:
        raise FencedError(
            "fenced",
            f"{path} was written by learner epoch {before.epoch}; this learner, epoch {checkpoint.epoch}, stops",
        )
    saves = 1 + (before.saves if before is not None else 0)
    header = {"epoch": checkpoint.epoch, "saves": saves, "position": checkpoint.position, "state": checkpoint.state}
    parts = encode_safetensors(checkpoint.arrays, {_HEADER: orjson.dumps(header).decode()})
    # The name has the pid, since a learner that was replaced may be at this very line too.
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        _write(fresh, parts)
        if newest is not None:  # a damaged file must not replace a whole previous one
            with suppress(FileNotFoundError):
                keep_as_previous(path)
        fresh.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # on a disk that is read-only, for one
            fresh.unlink()
        raise write_error(str(path.parent), error, "the checkpoint") from error


def _check_fits(path: Path, arrays: Mapping[str, NDArray[Any]], before: Checkpoint | None) -> None:
    """Raise `ModuleError` for a policy that the run's module cannot load.

    The run's module is the one that workers have told of, by the note in broker.json, or else that of `before`.
    """
    told = read_object(path.with_name("broker.json"))
    modules, kinds = told.get("weight_shapes", {}), told.get("weight_kinds", {})
    unsaved = f"nothing is saved to {path}: "
    if not modules and before is not None:
        unsaved = f"nothing is saved to {path}, which has a policy; to save another one there, move it away: "
        modules, kinds = _told_by(published_arrays(before.arrays), split_modules(arrays))
    if not modules or not arrays:
        return
    try:
        fit_published(arrays, modules, kinds)
        if all(name.startswith(CONNECTORS) for name in arrays):
            check_shapes({}, next(iter(modules.values())))
    except WeightsMismatchError as error:
        differ = error.missing, error.unknown, error.shapes, error.module_id, error.dtypes
        raise WeightsMismatchError(*differ, unsaved=unsaved) from None
    except ModuleError as error:
        raise ModuleError(f"{unsaved}{error}") from None


def _told_by(
    saved: Mapping[str, NDArray[Any]], given: Mapping[str, Any] | None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return shapes and kinds of saved weights by module. An only module without a name has that of `given`."""
    nameless = next(iter(given)) if given is not None and len(given) == 1 else DEFAULT_MODULE_ID
    by_module = split_modules(saved) or {nameless: dict(saved)}
    own = {id: {n: a for n, a in arrays.items() if not n.startswith(CONNECTORS)} for id, arrays in by_module.items()}
    shapes = {id: {name: array.shape for name, array in arrays.items()} for id, arrays in own.items() if arrays}
    return shapes, {id: "".join(kind_of(array.dtype) for array in arrays.values()) for id, arrays in own.items()}


def keep_as_previous(path: Path) -> None:
    """Keep the checkpoint at `path` also as the previous one. It stays at `path`, where other processes may read it."""
    link = path.with_name(f"{path.name}.{os.getpid()}.previous.new")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without links: `path` is missing until the new one is there
        path.replace(previous_path(path))
        return
    link.replace(previous_path(path))
    link.unlink(missing_ok=True)  # a rename does nothing where both are the same file, after a kill at this line


def hold_checkpoint(path: Path, at: Path) -> Checkpoint | None:
    """Keep the present checkpoint at `path` also at `at`, and load it. Return None if there is none at the moment.

    A later save does not change the file at `at`. Raises `CheckpointError`, and `RunDirError` when the folder cannot be
    written to.
    """
    try:
        at.unlink(missing_ok=True)
        try:
            os.link(path, at)
        except FileNotFoundError:
            return None
        except OSError:  # a file system without links
            shutil.copyfile(path, at)
        return _read(at)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise write_error(str(at.parent), error, "a copy of the checkpoint") from error


def keep_best(held: Path, best: Path) -> None:
    """Move the checkpoint that `hold_checkpoint` kept at `held` to `best`, in one step. Raises `RunDirError`."""
    with writing(best.parent, "the best checkpoint"):
        held.replace(best)
        sync_folder(best.parent)


def load_checkpoint(path: Path) -> Checkpoint | None:
    """Load the checkpoint at `path`, or None when there never was one.

    A damaged file is logged and the previous one is loaded. Raises `CheckpointError` when that one is damaged too, and
    `RunDirError` where the disk does not give the file, which may be whole.
    """
    previous = previous_path(path)
    if not is_there(path):
        # The learner was killed between the two moves of a save, on a file system without links: the previous one is
        # whole, and no newer one was ever in use.
        return _read(previous) if is_there(previous) else None
    try:
        return _read(path)
    except CheckpointError as error:
        if not is_there(previous):
            raise
        log.warning("%s; going on from %s, one update older", error, previous)
        return _read(previous)


def published_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays with which a checkpoint's policy acts: weights and connector state, as they were published."""
    arrays = {name: array for name, array in arrays.items() if not name.startswith(OWN)}
    by_module = split_modules(arrays)
    if by_module is not None:
        return join_modules({module_id: published_arrays(own) for module_id, own in by_module.items()})
    kept = {name: array for name, array in arrays.items() if name.startswith((MODULE, CONNECTORS))}
    return {name.removeprefix(MODULE): array for name, array in kept.items()}


def stored_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return published arrays under the names that a checkpoint gives them: the reverse of `published_arrays`."""
    by_module = split_modules(arrays)
    if by_module is not None:
        return join_modules({module_id: stored_arrays(own) for module_id, own in by_module.items()})
    return {name if name.startswith(CONNECTORS) else f"{MODULE}{name}": array for name, array in arrays.items()}


def _write(path: Path, parts: list[Buffer]) -> None:
    with open(path, "wb", opener=opener) as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Checkpoint:
    try:
        with reading(path, "the checkpoint"):
            return decode_checkpoint(read_regular(path), str(path))
    except MemoryError as error:
        reason = f"its {path.stat().st_size:,} bytes need more memory than this process can get"
        raise CheckpointError(str(path), reason) from error


def decode_checkpoint(data: bytes, path: str) -> Checkpoint:
    """Return the checkpoint in the bytes of a file, from `path`. Raises `CheckpointError` for any that is not whole."""
    try:
        arrays, metadata = decode_safetensors(data)
        header = orjson.loads(metadata[_HEADER])
        epoch, position, state = (header[key] for key in ("epoch", "position", "state"))
    except DecodeError as error:
        raise CheckpointError(path, error.detail) from error
    except (KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise CheckpointError(path, "it is a whole safetensors file, but no learner's checkpoint") from error
    saves = header.get("saves", 0)
    numbers = type(epoch) is int and type(saves) is int and 0 <= epoch <= MOST_EPOCH and 0 <= saves <= MOST_WEIGHTS_SEQ
    if not numbers or not isinstance(position, list) or not isinstance(state, dict):
        raise CheckpointError(path, "it is a whole safetensors file, but no learner's checkpoint")
    return Checkpoint(epoch, position, state, arrays, saves)


def _whole(path: Path) -> Checkpoint | None:
    """Return the checkpoint at `path`; None where there is none, or one that is damaged and so holds no work."""
    try:
        return _read(path)
    except (FileNotFoundError, CheckpointError):
        return None

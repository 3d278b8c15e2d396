"""The learner's checkpoint: one file, written whole or not at all, read without running any of its bytes.

It is a safetensors file with a checksum (`schemas/safetensors.py`):

    arrays      "module/..." weights, "optimizer/..." moments, "connectors/..." what connectors have learnt; of several
                modules, each name begins with "modules/MODULE_ID/"
    metadata    "headrace": JSON of epoch, position in the stream, and state (counters, newest returns)

A new checkpoint is written beside the old one, flushed to disk, and moved into its place. The old one is kept as
`<name>.previous`. So a `kill -9` at any moment leaves at least one whole file.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.schemas.errors import CheckpointError, DecodeError, FencedError, RunDirError
from headrace.schemas.manifest import Buffer
from headrace.schemas.safetensors import decode_safetensors, encode_safetensors
from headrace.schemas.weights import CONNECTORS, join_modules, split_modules

log = logging.getLogger("headrace.learner")

_HEADER = "headrace"
"""The entry of the file's metadata."""
_FORMER_MAGIC = b"HDRCCKPT"
_MODULE = "module/"
"""Prefix of the names of a module's weights, which stand beside those of its optimizer."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state from which a learner goes on.

    - epoch: of the learner that wrote it.
    - position: from `EpisodeStream.position()`, including all batches that were trained on.
    - state: plain JSON values (counters, learning rate).
    - arrays: module and optimizer tensors by name.
    """

    epoch: int
    position: list[dict[str, Any]]
    state: dict[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)


def previous_path(path: Path) -> Path:
    """Return the path of the checkpoint before the one at `path`."""
    return path.with_name(path.name + ".previous")


def save_checkpoint(path: Path, checkpoint: Checkpoint, *, claim: bool = False) -> None:
    """Replace the checkpoint at `path`, which becomes the previous one. Blocks until the new one is on disk.

    Raises `FencedError` when a learner of a higher epoch has written there: a learner that slept while another took its
    place must not undo the other's work. Raises `RunDirError` when the folder cannot be written to.

    `claim` writes in any case, and removes half-written files of killed learners. A learner that starts uses it to take
    over any checkpoint, even from a fleet whose epochs were lost.
    """
    if claim:
        for orphan in path.parent.glob(f"{path.name}.*.new"):
            orphan.unlink(missing_ok=True)
    else:
        _refuse_if_newer(path, checkpoint.epoch)
    header = {"epoch": checkpoint.epoch, "position": checkpoint.position, "state": checkpoint.state}
    parts = encode_safetensors(checkpoint.arrays, {_HEADER: orjson.dumps(header).decode()})
    # The name has the pid, since a learner that was replaced may be at this very line too.
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        _write(fresh, parts)
        if path.exists():
            path.replace(previous_path(path))
        fresh.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise RunDirError(str(path.parent), f"the checkpoint cannot be written ({error.strerror})") from error


def hold_checkpoint(path: Path, at: Path) -> Checkpoint | None:
    """Keep what is at `path` now at `at` too, and load it. Return None where there is nothing at the moment.

    A later save does not change it. Raises `CheckpointError`, and `RunDirError` when the folder cannot be written to.
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
        raise RunDirError(str(at.parent), f"the checkpoint cannot be kept ({error.strerror})") from error


def keep_best(held: Path, best: Path) -> None:
    """Let the checkpoint that `hold_checkpoint` kept at `held` be the best one, in one step. Raises `RunDirError`."""
    try:
        held.replace(best)
        _sync_folder(best.parent)
    except OSError as error:
        raise RunDirError(str(best.parent), f"the best checkpoint cannot be kept ({error.strerror})") from error


def load_checkpoint(path: Path) -> Checkpoint | None:
    """Load the checkpoint at `path`, or None when there never was one.

    A damaged file is logged and the previous one is loaded. Raises `CheckpointError` when that one is damaged too.
    """
    previous = previous_path(path)
    if not path.exists():
        # The learner was killed between the two moves of a save: the previous one is whole, and no newer one was ever
        # in use.
        return _read(previous) if previous.exists() else None
    try:
        return _read(path)
    except CheckpointError as error:
        if not previous.exists():
            raise
        log.warning("%s; going on from %s, one update older", error, previous)
        return _read(previous)


def training_arrays(module: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return both state dicts' tensors as arrays by name, sharing their memory.

    Hyperparameters are not kept: they are the config's.
    """
    tensors = {f"{_MODULE}{name}": tensor for name, tensor in module.items()}
    for index, moments in optimizer["state"].items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in moments.items()}
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def training_tensors(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Return (module state dict, optimizer's "state") from `training_arrays`, in memory of their own."""
    module: dict[str, Tensor] = {}
    optimizer: dict[int, dict[str, Tensor]] = {}
    for name, array in arrays.items():
        part, _, rest = name.partition("/")
        tensor = torch.from_numpy(array.copy())  # a file's arrays are read-only, and torch warns of those
        if part == "module":
            module[rest] = tensor
        else:
            index, _, moment = rest.partition("/")
            optimizer.setdefault(int(index), {})[moment] = tensor
    return module, optimizer


def published_arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays with which a checkpoint's policy acts: weights and connector state, as they were published."""
    by_module = split_modules(arrays)
    if by_module is not None:
        return join_modules({module_id: published_arrays(own) for module_id, own in by_module.items()})
    kept = {name: array for name, array in arrays.items() if name.startswith((_MODULE, CONNECTORS))}
    return {name.removeprefix(_MODULE): array for name, array in kept.items()}


def _write(path: Path, parts: list[Buffer]) -> None:
    with path.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Checkpoint:
    data = path.read_bytes()
    if data.startswith(_FORMER_MAGIC):
        raise CheckpointError(str(path), "it is of an earlier Headrace, whose checkpoints this one cannot read")
    try:
        arrays, metadata = decode_safetensors(data)
        header = orjson.loads(metadata[_HEADER])
        epoch, position, state = (header[key] for key in ("epoch", "position", "state"))
    except DecodeError as error:
        raise CheckpointError(str(path), error.detail) from error
    except (KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise CheckpointError(str(path), "it is a whole safetensors file, but no learner's checkpoint") from error
    if not isinstance(epoch, int) or not isinstance(position, list) or not isinstance(state, dict):
        raise CheckpointError(str(path), "it is a whole safetensors file, but no learner's checkpoint")
    return Checkpoint(epoch, position, state, arrays)


def _refuse_if_newer(path: Path, epoch: int) -> None:
    try:
        written = _read(path).epoch
    except (FileNotFoundError, CheckpointError):
        return  # the file is not whole, so there is no work to undo
    if written > epoch:
        raise FencedError(
            "fenced", f"{path} was written by learner epoch {written}; this learner, epoch {epoch}, stops"
        )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

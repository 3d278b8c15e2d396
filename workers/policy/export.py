"""A policy as a file for other programs: observations in, the most likely actions in the env's units out."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.schemas.basics.run_files import opener
from headrace.schemas.chunks.spaces import Space, Spaces, column_dtype, leaves, nest
from headrace.schemas.errors import ExportError
from headrace.workers.connectors.vector_connectors import VectorConnectors
from headrace.workers.envs.actions import RandomActions
from headrace.workers.policy.acting import flatten_actions

Run = Callable[..., Any]
"""The written program: leaves of a batch of observations in, leaves of its actions out."""

_TOLERANCE = 1e-4
"""Relative and absolute tolerance of real-valued actions: other programs may sum in another order."""
_OVERHEAD = 1 << 16
"""Bytes of a file beyond its tensors."""
_ROWS = (1, 7)
"""Sizes of the batches with which a file is tried before it is kept."""


class _ActionsOfObservations(torch.nn.Module):
    """The whole way from the env's observations to its actions, by torch operations alone."""

    def __init__(self, module: torch.nn.Module, connectors: VectorConnectors, spaces: Spaces) -> None:
        super().__init__()
        self.module = module
        self.connectors, self.spaces = connectors, spaces
        self.inputs, self.outputs = _names(spaces.observation, "obs"), _names(spaces.action, "actions")
        self._infer: Any = getattr(module, "torch_inference", module.forward_inference)

    def forward(self, *observation: Tensor) -> Any:
        """Return the leaves of the env's actions, given those of its observations."""
        own, connectors = self.connectors.spaces, self.connectors
        seen: Any = connectors.torch_observations(dict(zip(self.inputs, observation, strict=True)))
        answer = self._infer({"obs": nest(own.observation, seen, "obs")})
        actions = flatten_actions(own.action, answer["actions"], "actions")
        sent = flatten_actions(own.action, answer.get("actions_for_env", answer["actions"]), "actions")
        made = connectors.torch_actions(sent, actions)
        typed = [_cast(made[name], column_dtype(leaf)) for name, leaf in leaves(self.spaces.action, "actions")]
        return typed[0] if len(typed) == 1 else tuple(typed)


def export_policy(
    path: Path, module: torch.nn.Module, connectors: VectorConnectors, spaces: Spaces, act: Callable[[Any], Any]
) -> Path:
    """Write the policy of `module` and its frozen `connectors` to `path`; return the path.

    The file is kept only if its actions for random batches of the env's observations are those of `act`. Raises
    `ExportError`.
    """
    write = _WRITERS.get(path.suffix)
    if write is None:
        raise ExportError(str(path), f"name a file that ends with {', '.join(_WRITERS)}")
    if not path.absolute().parent.is_dir():
        raise ExportError(str(path), "it cannot be written, since there is no such folder")
    if hasattr(module, "initial_state"):
        name = type(module).__name__
        raise ExportError(str(path), f"{name} remembers earlier observations, and an exported function has no memory")
    if (piece := connectors.first_not_exportable) is not None:
        raise ExportError(
            str(path), f"connector {piece} looks at earlier steps or at the agent, or has no method torch_process"
        )
    whole = _ActionsOfObservations(module, connectors, spaces).eval()
    aside = path.with_name(f".{path.stem}.new{path.suffix}")
    try:
        _reserve(aside, whole)
        with _quiet_torch(), torch.no_grad():
            _check(path, write(whole, _random_leaves(spaces.observation, 2), aside), spaces, act)
        aside.replace(path)
    except ExportError:
        raise
    except OSError as error:
        raise ExportError(str(path), f"it cannot be written ({error.strerror})") from error
    except Exception as error:
        reason = f"{type(module).__name__} does not consist of torch operations alone ({_brief(error)})"
        raise ExportError(str(path), f"{reason}; give it a method torch_inference(batch) that does") from error
    finally:
        with suppress(OSError):  # the folder cannot be written to
            aside.unlink(missing_ok=True)
    return path


def _reserve(path: Path, module: torch.nn.Module) -> None:
    """Raise `OSError` unless a file of about the size of `module` can be written. Torch's own errors do not say why."""
    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    with open(path, "wb", opener=opener) as file:
        if hasattr(os, "posix_fallocate"):  # macOS lacks it
            os.posix_fallocate(file.fileno(), 0, size + _OVERHEAD)


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Suppress torch's warnings about its own parts, and about sizes, which `_check` tests."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _write_torchscript(whole: _ActionsOfObservations, batch: list[Tensor], path: Path) -> Run:
    script: Any = torch.jit.trace(whole, tuple(batch))  # type: ignore[no-untyped-call]
    script.save(str(path))
    return script  # type: ignore[no-any-return]


def _write_program(whole: _ActionsOfObservations, batch: list[Tensor], path: Path) -> Run:
    program = torch.export.export(whole, tuple(batch), dynamic_shapes=_any_rows(batch))
    torch.export.save(program, path)
    return program.module()


def _write_onnx(whole: _ActionsOfObservations, batch: list[Tensor], path: Path) -> Run:
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ExportError(str(path), f"{error}; pip install 'headrace[onnx]'") from error
    program: Any = torch.onnx.export(
        whole,
        tuple(batch),
        dynamo=True,
        dynamic_shapes=_any_rows(batch),
        input_names=whole.inputs,
        output_names=whole.outputs,
        verbose=False,
    )
    program.save(path)
    return whole  # to run the file itself would need another package


_WRITERS: dict[str, Callable[[_ActionsOfObservations, list[Tensor], Path], Run]] = {
    ".pt": _write_torchscript,
    ".pt2": _write_program,
    ".onnx": _write_onnx,
}


def _any_rows(batch: list[Tensor]) -> Any:
    """Return the shapes of an exported program's arguments: any number of rows, the same in all."""
    rows = torch.export.Dim("rows")
    return (tuple({0: rows} for _ in batch),)


def _check(path: Path, run: Run, spaces: Spaces, act: Callable[[Any], Any]) -> None:
    for rows in _ROWS:
        batch = _random_leaves(spaces.observation, rows)
        columns = {name: leaf.numpy() for name, leaf in zip(_names(spaces.observation, "obs"), batch, strict=True)}
        due = flatten_actions(spaces.action, act(nest(spaces.observation, columns, "obs")), "actions")
        made = run(*batch)
        for (name, wanted), seen in zip(due.items(), [made] if isinstance(made, Tensor) else made, strict=True):
            if seen.shape != wanted.shape or not np.allclose(seen.numpy(), wanted, _TOLERANCE, _TOLERANCE):
                raise ExportError(
                    str(path),
                    f"it would give other {name} than the policy itself for a batch of {rows} rows: a module's "
                    "torch_inference must do what forward_inference does, for any number of rows",
                )


def _random_leaves(space: Space, rows: int) -> list[Tensor]:
    """Return a batch of values of the space, one tensor for each leaf."""
    values = RandomActions(space)
    noise = np.random.default_rng(0).random((rows, values.noise_size), np.float32)
    return [torch.from_numpy(np.ascontiguousarray(column)) for column in values(noise).values()]


def _names(space: Space, root: str) -> list[str]:
    return [name for name, _ in leaves(space, root)]


def _cast(tensor: Tensor, dtype: np.dtype[Any]) -> Tensor:
    empty: NDArray[Any] = np.empty(0, dtype)
    return tensor.detach().to(torch.from_numpy(empty).dtype)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"

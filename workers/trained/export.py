"""A policy as a file for other programs: observations in, the most likely actions in the env's units out."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.schemas.basics.run_files import opener
from headrace.schemas.chunks.spaces import Space, Spaces, column_dtype, leaf_shape, leaves, nest
from headrace.schemas.errors import ModuleError, absolute, export_error, is_there
from headrace.workers.connectors.vector_connectors import VectorConnectors
from headrace.workers.envs.actions import RandomActions
from headrace.workers.policy.acting import flatten_actions
from headrace.workers.policy.module_protocol import action_chunk_size, has_newest

Run = Callable[..., Any]
"""The written program: leaves of a batch of observations in, leaves of its actions out."""

_TOLERANCE = 1e-4
"""Relative and absolute tolerance of real-valued actions: other programs may sum in another order."""
_OVERHEAD = 1 << 16
"""Bytes of a file beyond its tensors."""
_ROWS = (1, 7)
"""Sizes of the batches with which a file is tried before it is kept."""
_NOT_TORCH = "does not consist of torch operations alone"
_CAUSES = (
    (
        r"GuardOnDataDependent|data-dependent",
        "takes a path that depends on values of observations, by an `if`, a loop, int(), .item() or a choice of rows "
        "by a mask; torch.where, clamp and gather choose without one",
    ),
    (
        r"Constraints violated|specialized it|Expected \d+ elements|invalid for input of size|Got invalid dimensions",
        "is bound to one number of rows, by a loop over them, an `if` on it or a number in view or reshape; use "
        "operations on whole batches, and -1 or obs.shape[0] for their number",
    ),
    (
        r"No ONNX function found|missing ONNX function|No decompositions registered",
        "has an operation that ONNX lacks; use others, or export to .pt2 or .pt",
    ),
)
"""(Pattern of torch's errors, what the module does, and what to do)."""
_WRITES_PROGRAMS = "2.10"
"""The oldest torch that writes .pt2 and .onnx of Headrace's own modules. Of 2.4 to 2.9, each failed at them."""
_OPERATION = re.compile(r"op='([^']+)'")
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (?!forward\b)')
_COLOUR = re.compile(r"\x1b\[\d+m")


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A policy's file for other programs.

    - form: its format in words.
    - inputs, outputs: (name, dtype and shape) in their order.
    - unread: inputs that the policy does not read, so that the file has none of them.
    - difference: the largest one from the policy's own actions, over batches of `_ROWS` random observations.
    """

    path: Path
    form: str
    inputs: Sequence[tuple[str, str]]
    outputs: Sequence[tuple[str, str]]
    unread: Sequence[str]
    difference: float

    def in_words(self) -> str:
        """Return what a program needs to use the file, a line for each input and output."""
        lines = [self.form]
        for what, given in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"  {what} {number}: {name}, {kind}" for number, (name, kind) in enumerate(given, 1)]
        lines += [f"  it does not read {name}, so the file has no such input" for name in self.unread]
        rows = " and ".join(map(str, _ROWS))
        lines.append(
            f"  tried with {rows} random observations: the largest difference from the policy's own actions is "
            f"{self.difference:.2g} (at most {_TOLERANCE:g}, absolute and relative)"
        )
        return "\n".join(lines)


class _ActionsOfObservations(torch.nn.Module):
    """The whole way from the env's observations to its actions, by torch operations alone."""

    def __init__(self, module: torch.nn.Module, connectors: VectorConnectors, spaces: Spaces) -> None:
        super().__init__()
        self.module = module
        self.connectors, self.spaces = connectors, spaces
        self.inputs, self.outputs = _names(spaces.observation, "obs"), _names(spaces.action, "actions")
        own = has_newest(module, "torch_inference", "forward_inference")
        self._infer: Any = module.torch_inference if own else module.forward_inference

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
) -> ExportedFile:
    """Write the policy of `module` and its frozen `connectors` to `path`.

    The file is kept only if its actions for random batches of the env's observations are those of `act`. Raises
    `ModuleError`.
    """
    write = _WRITERS.get(path.suffix)
    if write is None:
        raise export_error(str(path), f"name a file that ends with {', '.join(_WRITERS)}")
    if not (is_there(folder := absolute(path).parent) and folder.is_dir()):
        raise export_error(str(path), "it cannot be written, since there is no such folder")
    name = type(module).__name__
    if action_chunk_size(module) > 1:
        raise export_error(
            str(path), f"{name} chooses several steps at once, and an exported function one; act by load_policy"
        )
    if hasattr(module, "initial_state"):
        raise export_error(
            str(path),
            f"{name} remembers earlier observations, and an exported function has no memory, nor an input for its "
            "state; act by load_policy, or by `headrace serve`",
        )
    if (piece := connectors.first_not_exportable) is not None:
        raise export_error(
            str(path), f"connector {piece} looks at earlier steps or at the agent, or has no method torch_process"
        )
    whole = _ActionsOfObservations(module, connectors, spaces).eval()
    aside = path.with_name(f".{path.stem}.new{path.suffix}")
    try:
        _reserve(aside, whole)
        with _quiet_torch() as said, torch.no_grad():
            form, names, run = write(whole, _random_leaves(spaces.observation, 2), aside)
            difference = _check(path, run, spaces, act, said)
        aside.replace(path)
    except ModuleError:
        raise
    except OSError as error:
        raise export_error(str(path), f"it cannot be written ({error.strerror})") from error
    except Exception as error:
        if path.suffix != ".pt" and torch.__version__ < _WRITES_PROGRAMS:
            advice = f"cannot write {path.suffix} files of most modules; use torch 2.10 or newer, or export to .pt"
            raise export_error(str(path), f"torch {torch.__version__} {advice} ({_brief(error)})") from error
        raise export_error(str(path), f"{type(module).__name__} {_why(error)}") from error
    finally:
        with suppress(OSError):  # the folder cannot be written to
            aside.unlink(missing_ok=True)
    inputs, outputs = _kinds(spaces.observation, "obs"), _kinds(spaces.action, "actions")
    read = [(name, kind) for name, kind in inputs if name in names]
    return ExportedFile(path, form, read, outputs, [name for name, _ in inputs if name not in names], difference)


def _kinds(space: Space, root: str) -> list[tuple[str, str]]:
    """Return (name, dtype and shape) of each leaf."""
    return [
        (name, f"{column_dtype(leaf)} {('rows', *leaf_shape(leaf))}".replace("'", ""))
        for name, leaf in leaves(space, root)
    ]


def _why(error: BaseException) -> str:
    """Return, in words, what of the module torch cannot write, and what to do."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    for pattern, sentence in _CAUSES:
        for one in reversed(chain):
            told = f"{type(one).__name__}: {one}"
            if re.search(pattern, told):
                found = _OPERATION.search(" ".join(map(str, chain)))
                where = [place for place in _PLACE.findall(told) if "/torch/" not in place[0]]
                at = f", at {where[-1][0]}:{where[-1][1]}" if where else f", {found[1]}" if found else ""
                return f"{sentence} ({_brief(one)}{at})"
    return f"{_NOT_TORCH} ({_brief(chain[-1])}); give it a method torch_inference(batch) that does"


def _reserve(path: Path, module: torch.nn.Module) -> None:
    """Raise `OSError` unless a file of about the size of `module` can be written. Torch's own errors do not say why."""
    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    with open(path, "wb", opener=opener) as file:
        if hasattr(os, "posix_fallocate"):  # macOS lacks it
            os.posix_fallocate(file.fileno(), 0, size + _OVERHEAD)


@contextmanager
def _quiet_torch() -> Iterator[list[warnings.WarningMessage]]:
    """Keep torch's warnings, log lines and prints off the terminal: it prints its graphs. Return the warnings."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(record=True) as said,
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("always")
            yield said
    finally:
        logger.setLevel(level)


_Written = tuple[str, Sequence[str], Run]
"""The kind of the file in words, the names of its inputs, and the program in it."""


def _write_torchscript(whole: _ActionsOfObservations, batch: list[Tensor], path: Path) -> _Written:
    script: Any = torch.jit.trace(whole, tuple(batch))  # type: ignore[no-untyped-call]
    script.save(str(path))
    return "TorchScript, for torch.jit.load and LibTorch", whole.inputs, script


def _write_program(whole: _ActionsOfObservations, batch: list[Tensor], path: Path) -> _Written:
    program = torch.export.export(whole, tuple(batch), dynamic_shapes=_any_rows(batch))
    torch.export.save(program, path)
    return "an exported program, for torch.export.load", whole.inputs, program.module()


def _write_onnx(whole: _ActionsOfObservations, batch: list[Tensor], path: Path) -> _Written:
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise export_error(str(path), f"{error}; pip install 'headrace[onnx]'") from error
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
    opset = f"ONNX of opset {program.model.opset_imports['']}"
    names = [given.name for given in program.model.graph.inputs]
    try:
        import onnxruntime
    except ImportError:
        return f"{opset}; the module was tried in its place, since onnxruntime is not installed", names, whole
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        advice = f"onnxruntime {onnxruntime.__version__} does not read {opset} ({_brief(error)})"
        raise export_error(str(path), f"{advice}; pip install --upgrade onnxruntime") from error

    def run(*columns: Tensor) -> list[Tensor]:
        given = {name: column.numpy() for name, column in zip(whole.inputs, columns, strict=True) if name in names}
        return [torch.from_numpy(made) for made in session.run(None, given)]

    return f"{opset}, tried by onnxruntime {onnxruntime.__version__}", names, run


_WRITERS: dict[str, Callable[[_ActionsOfObservations, list[Tensor], Path], _Written]] = {
    ".pt": _write_torchscript,
    ".pt2": _write_program,
    ".onnx": _write_onnx,
}


def _any_rows(batch: list[Tensor]) -> Any:
    """Return the shapes of an exported program's arguments: any number of rows, the same in all."""
    rows = torch.export.Dim("rows")
    return (tuple({0: rows} for _ in batch),)


def _check(
    path: Path, run: Run, spaces: Spaces, act: Callable[[Any], Any], said: Sequence[warnings.WarningMessage]
) -> float:
    """Return the largest difference of the file's actions from those of `act`. Raises `ModuleError` for a large one."""
    largest = 0.0
    for rows in _ROWS:
        batch = _random_leaves(spaces.observation, rows)
        columns = {name: leaf.numpy() for name, leaf in zip(_names(spaces.observation, "obs"), batch, strict=True)}
        due = flatten_actions(spaces.action, act(nest(spaces.observation, columns, "obs")), "actions")
        made = run(*batch)
        for (name, wanted), seen in zip(due.items(), [made] if isinstance(made, Tensor) else made, strict=True):
            is_alike = seen.shape == wanted.shape
            difference = float(np.abs(seen.numpy().astype(np.float64) - wanted).max()) if is_alike else math.inf
            largest = max(largest, difference)
            if not is_alike or not np.allclose(seen.numpy(), wanted, _TOLERANCE, _TOLERANCE):
                how = f"by up to {difference:.3g}" if is_alike else f"of shape {tuple(seen.shape)}, not {wanted.shape}"
                raise export_error(
                    str(path),
                    f"it would give other {name} than the policy itself for a batch of {rows} rows ({how}"
                    f"{_traced(said)}): a module's torch_inference must do what forward_inference does, for any number "
                    "of rows",
                )
    return largest


def _traced(said: Sequence[warnings.WarningMessage]) -> str:
    """Return what torch warned of while it traced the module, with the place; "" for nothing."""
    for one in said:
        if one.category.__name__ == "TracerWarning" and one.filename != __file__:
            return f"; torch says of {one.filename}:{one.lineno}: {' '.join(str(one.message).split())[:120]}"
    return ""


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


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(_COLOUR.sub('', str(error)).split()):.200}"

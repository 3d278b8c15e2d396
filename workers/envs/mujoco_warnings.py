"""MuJoCo's warnings go to the log. By itself MuJoCo writes them to MUJOCO_LOG.TXT in the folder that one runs in."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from headrace.schemas.basics.counted_warnings import CountedWarnings

_NAME = "mujoco"
_warnings = CountedWarnings(logging.getLogger(__name__))


class _WhenImported:
    """A finder for `sys.meta_path`. Envs import MuJoCo while they are built, and its first warning comes then."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> object:
        """Return how to import MuJoCo, and leave `sys.meta_path`."""
        if name != _NAME:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = find_spec(name)
        return _then_redirected(spec) if spec is not None else None


def _then_redirected(spec: ModuleSpec) -> ModuleSpec:
    assert spec.loader is not None
    load = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        _redirect(module)

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


def _redirect(mujoco: ModuleType) -> None:
    if mujoco.get_mju_user_warning() is None:  # the user has no place for them
        mujoco.set_mju_user_warning(lambda text: _warnings.warn(b"", text.partition(".")[0], f"MuJoCo: {text}"))


def log_warnings_of_mujoco() -> None:
    """Let this process log MuJoCo's warnings from now on, whenever it imports MuJoCo."""
    mujoco = sys.modules.get(_NAME)
    if mujoco is not None:
        _redirect(mujoco)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())  # type: ignore[arg-type]

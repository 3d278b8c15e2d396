"""The outside truth: an env that writes one byte a step into a file of its own, and the reading of these files.

The files are the only count of steps that no part of Headrace keeps. Each env instance has one:

    SLOT-INCARNATION-INDEX-PID-TIME.steps    its size is the number of steps

The witness writes a byte when the inner env has returned from `step`, even if the result is invalid: it was a step. A
worker that dies therefore has at most one byte for each of its envs that it had not counted yet. The incarnation is 0
in env processes, where it is unknown.

The env also takes orders: the first env that finds a file `order` fails as the file says.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
from pydantic import BaseModel, ConfigDict

from headrace.deploy.process.recorders import Life
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import build_env, find_creator

ENV = f"{__name__}:witnessed"
_NAME = re.compile(r"(\d+)-(\d+)-\d+-\d+-\d+\.steps")
_RECORDER = re.compile(r"/worker-(\d{1,9})-(\d{1,9})\.rec\b")
_ORDER = "order"
_HANG_S = 3600.0


class Witnessed(BaseModel):
    """The `env_config` of `witnessed`: the env, and the folder for its files."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    env: str
    env_config: dict[str, Any] = {}
    folder: str
    pause_s: float = 0.0
    """Seconds that each step waits. A machine whose cores are full would measure itself, not the fleet."""
    faulty_slots: int = 0
    """Envs of slots below this one take orders."""


def witnessed(context: EnvContext) -> gym.Env[Any, Any]:
    """Return the env of `Witnessed.env`, with a witness around it. Raises what the env's creator raises."""
    settings = Witnessed.model_validate(dict(context))
    env = build_env(find_creator(settings.env), context.with_config(settings.env_config))
    return Witness(env, settings, context.worker_index, context.vector_index)


class Witness(gym.Wrapper[Any, Any, Any, Any]):
    """Writes one byte a step. Fails when an order says so."""

    def __init__(self, env: gym.Env[Any, Any], settings: Witnessed, slot: int, index: int) -> None:
        super().__init__(env)
        folder = Path(settings.folder)
        life = _own_life() or (slot, 0)
        name = f"{life[0]}-{life[1]}-{index}-{os.getpid()}-{time.time_ns()}.steps"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / name, flags, 0o600)
        self._order = str(folder / _ORDER)
        self._pause_s = settings.pause_s
        self._takes_orders = life[0] < settings.faulty_slots

    def step(self, action: Any) -> Any:
        """Step the inner env, then write the byte."""
        fault = self._take_order() if self._takes_orders and os.access(self._order, os.F_OK) else ""
        if fault == "exception":
            raise RuntimeError("headrace chaos ordered this env to raise")
        if fault == "hang":
            time.sleep(_HANG_S)
        if fault == "segfault":
            ctypes.string_at(0)
        if self._pause_s:
            time.sleep(self._pause_s)
        answer = self.env.step(action)
        os.write(self._file, b"\1")
        return (answer[0], float("nan"), *answer[2:]) if fault == "bad-data" else answer

    def close(self) -> None:
        """Close the file and the inner env."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        super().close()

    def _take_order(self) -> str:
        """Return the order if no other env has taken it."""
        mine = f"{self._order}-{os.getpid()}-{time.time_ns()}"
        try:
            Path(self._order).rename(mine)
        except FileNotFoundError:
            return ""
        return Path(mine).read_text()


def give_order(folder: Path, fault: str) -> None:
    """Order one env, the next one that steps, to fail in this way."""
    aside = folder / f".{_ORDER}"
    aside.write_text(fault)
    aside.rename(folder / _ORDER)


def take_back_order(folder: Path) -> None:
    """Take back an order that no env has taken."""
    (folder / _ORDER).unlink(missing_ok=True)


def steps_by_life(folder: Path) -> Counter[Life]:
    """Return the steps that were taken, by life. Incarnation 0: by slot, for envs in processes of their own."""
    steps: Counter[Life] = Counter()
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name)) is not None:
            steps[int(match[1]), int(match[2])] += path.stat().st_size
    return steps


def _own_life() -> Life | None:
    """Return (slot, incarnation) of this process, from the recorder that it has mapped; None without one."""
    match = _RECORDER.search(Path("/proc/self/maps").read_text())
    return (int(match[1]), int(match[2])) if match else None

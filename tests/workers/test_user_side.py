"""What an env changes in the whole process, and the signal handlers that it sets, hold in envs only."""

from __future__ import annotations

import ctypes
import locale
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.schemas.basics.stop_event import stop_event
from headrace.workers import EnvRunnerConfig
from headrace.workers.fleet import user_side
from headrace.workers.fleet.user_side import envs_apart
from headrace.workers.runner.single_agent_env_runner import open_runner
from support.envs.toy import Walk

_C = ctypes.CDLL(None)
_UPWARD = 0x800
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "np.seterr": (lambda: np.seterr(all="raise"), np.geterr),
    "warnings.filters": (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "default device": (lambda: torch.set_default_device("meta"), lambda: torch.empty(0).device),
    "locale": (lambda: locale.setlocale(locale.LC_ALL, "C"), lambda: locale.setlocale(locale.LC_ALL)),
    "recursion limit": (lambda: sys.setrecursionlimit(2500), sys.getrecursionlimit),
    "working directory": (lambda: os.chdir("/"), Path.cwd),
    "rounding mode": (lambda: _C.fesetround(_UPWARD), _C.fegetround),
}
"""What an env may change in its process, and how one sees it."""


@pytest.fixture(autouse=True)
def _process_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(Path.cwd())
    kept = np.geterr(), locale.setlocale(locale.LC_ALL), sys.getrecursionlimit()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield
    np.seterr(**kept[0])
    locale.setlocale(locale.LC_ALL, kept[1])
    sys.setrecursionlimit(kept[2])
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    _C.fesetround(0)


class Changing(Walk):
    """Makes its change in the call `config["at"]`, and notes the state of the process in each step."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._change("construction")

    def _change(self, at: str) -> None:
        if at == self.config["at"]:
            CHANGES[self.config["what"]][0]()

    def reset(self, **kwargs: Any) -> Any:
        self._change("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._change("step")
        self.config["seen"].append(CHANGES[self.config["what"]][1]())
        return super().step(action)


class Seeing(torch.nn.Module):
    """Notes the state of the process whenever it acts."""

    noise_size = 1
    noise_kind = "uniform"

    def __init__(self, spaces: Any, what: str, seen: list[Any]) -> None:
        super().__init__()
        self._read, self._seen = CHANGES[what][1], seen

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        self._seen.append(self._read())
        return {"actions": torch.zeros(len(batch["obs"]), dtype=torch.int64, device="cpu")}

    forward_inference = forward_exploration

    def forward_train(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("at", ["construction", "reset", "step"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_an_env_changes_in_the_process_holds_in_envs_only(
    what: str, at: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_side, "LOOK_INTERVAL_S", 0.0)
    env_config: dict[str, Any] = {"what": what, "at": at, "seen": []}
    ours = CHANGES[what][1]()
    config = EnvRunnerConfig(
        env=Changing, env_config=env_config, num_envs=2, seed=1, module=Seeing, module_config={"what": what, "seen": []}
    )
    with envs_apart() as calls, open_runner(config, calls=calls) as sampler:
        sampler.sample(num_timesteps=40)
        in_env, in_policy = sampler.config.env_config["seen"], sampler.config.module_config["seen"]
    assert in_policy == [ours] * len(in_policy) != []
    assert ours not in in_env
    assert CHANGES[what][1]() == ours
    assert [record.getMessage() for record in caplog.records if "whole process" in record.getMessage()][1:] == []
    assert "holds in envs, not in the policy" in caplog.text


class TooLate(BaseException):
    """An error of an env's own time limit."""


def _too_late(number: int, frame: object) -> None:
    raise TooLate("no answer")


class Timed(Walk):
    """Sets a handler that raises. The signal comes in a step of env 0, or in the policy."""

    def reset(self, **kwargs: Any) -> Any:
        signal.signal(self.config["number"], _too_late)
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        if self.index == 0 and self.config["in_env"] and self.t == 2:
            signal.raise_signal(self.config["number"])
        return super().step(action)


class Signalled(Seeing):
    """Gets the signal whenever it acts."""

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        signal.raise_signal(self._seen[0])
        return super().forward_exploration(batch)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGUSR1, signal.SIGPROF])
@pytest.mark.parametrize("in_env", [True, False])
def test_a_handler_of_an_env_raises_in_envs_only(
    number: signal.Signals, in_env: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = EnvRunnerConfig(
        env=Timed,
        env_config={"number": number, "in_env": in_env},
        num_envs=2,
        seed=1,
        module=Seeing if in_env else Signalled,
        module_config={"what": "recursion limit", "seen": [number]},
    )
    before = signal.getsignal(number)
    try:
        with envs_apart() as calls, open_runner(config, calls=calls) as sampler:
            chunks = sampler.sample(num_timesteps=20)
            assert sum(map(len, chunks)) >= 9
            assert (sampler.totals.env_failures > 0) == in_env
    finally:
        signal.signal(number, before)
    told = f"{number.name} came while no env was called, and _too_late ({__file__}:"
    assert (told in caplog.text) == (not in_env)


def test_a_library_in_c_does_not_take_the_signals_that_stop_the_process() -> None:
    with stop_event() as stopping, envs_apart() as calls:
        _C.signal(signal.SIGTERM, ctypes.c_void_p(1))  # SIG_IGN
        assert calls.sides is not None
        calls.sides.look()
        signal.raise_signal(signal.SIGTERM)
        assert stopping.is_set()


def test_an_env_does_not_take_the_signals_that_stop_its_process(caplog: pytest.LogCaptureFixture) -> None:
    with stop_event() as stopping, envs_apart():
        signal.signal(signal.SIGTERM, _too_late)
        signal.raise_signal(signal.SIGTERM)
        assert stopping.is_set()
    assert "SIGTERM is not handled by _too_late" in caplog.text


def test_a_stop_signal_tells_the_line_in_which_it_came() -> None:
    with stop_event() as stopping:
        assert stopping.came == ""
        signal.raise_signal(signal.SIGTERM)
    assert stopping.is_set()
    assert re.fullmatch(rf"SIGTERM, which came in test_a_stop_\w+ \({re.escape(__file__)}:\d+\)", stopping.came)

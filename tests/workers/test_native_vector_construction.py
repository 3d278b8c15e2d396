"""A vector of env processes with one env that hangs in construction: the runner waits no longer than its deadline."""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gymnasium.vector import AutoresetMode

from headrace.schemas.errors import EnvHangError, EnvRestartBudgetError
from support.envs.native_vectors import vector_of
from support.envs.toy import Counting, check_books, runner

pytestmark = pytest.mark.processes

KINDS: dict[str, dict[str, Any]] = {
    "of ours": {"gym_env_vectorize_mode": "async"},
    "of the user's": {},
}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


class NeverMade(Counting):
    """Env `config["index"]` is not made once the file `config["hangs"]` is there. Each raises at its second step."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if self.index == config["index"] and Path(config["hangs"]).exists():
            threading.Event().wait()

    def step(self, action: Any) -> Any:
        if self.t == 1:
            Path(self.config["hangs"]).touch()
            raise RuntimeError("diverged")
        return super().step(action)


def _runner(kind: str, hangs: Path, **settings: Any) -> Any:
    env = NeverMade if kind == "of ours" else vector_of(NeverMade, "async", AutoresetMode.SAME_STEP)
    config = {"index": 1, "hangs": str(hangs)}
    settings = {"env_reset_timeout_s": 0.25, **settings}
    return runner(env, num_envs=3, env_config=config, **KINDS[kind], **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_an_env_that_hangs_in_first_construction_raises_env_hang_error(kind: str, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    hangs.touch()
    words = r"env [0-2] did not return from construction within 2 \* env_reset_timeout_s = 0.5 s and "
    with pytest.raises(EnvHangError, match=words + "its process was killed") as raised:
        _runner(kind, hangs)
    *_, (frame, _) = traceback.walk_tb(getattr(raised.value.__cause__, "__traceback__", None))
    assert not frame.f_locals, "Python 3.14 warns when such a frame has the buffer of a send that failed"


# Gymnasium's AsyncVectorEnv tells of an env's error by warnings too, before it raises it.
@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_an_env_that_hangs_in_a_rebuild_counts_as_an_env_failure(kind: str, tmp_path: Path) -> None:
    # From Python 3.14 on, the processes of an env that a user's vector makes import what it needs.
    began = time.monotonic()
    _runner(kind, tmp_path / "hangs", env_reset_timeout_s=60).stop()
    patience_s = 1.0 + time.monotonic() - began
    with _runner(kind, tmp_path / "hangs", env_restart_attempts=1, env_reset_timeout_s=patience_s) as sampler:
        with pytest.raises(EnvRestartBudgetError, match="did not return from construction"):
            sampler.sample(num_timesteps=30)
        assert sampler.totals.env_failures == 2
        check_books(sampler)

"""Faults of an inline env that its worker survives: sibling envs stay bit-identical, the env comes back or waits, the
worker drains, and the books name every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.errors import EnvError
from headrace.workers.envs import restarts
from support.envs import inline_faults
from support.envs.fault_table import BAD_DATA, BURDENS
from support.pipeline.delivery import BrokerThread, StartBroker
from support.pipeline.fault_runs import brief, check_alike, lives_of
from support.pipeline.worker_threads import WorkerThread
from support.waiting import wait_until

pytestmark = pytest.mark.processes

FAULTY, SIBLINGS = 1, (0, 2)
Run = Callable[..., WorkerThread]


def _env_config(at: str, fault: str, tmp_path: Path) -> dict[str, Any]:
    """Every life of the env has a fault in its steps; other faults are those of its first one, or of its second."""
    first = again = {at: fault}
    if at == "close":
        first = again = {"step": "raises", at: fault}
    elif at == "construction":
        first = {"step": "raises"}
    elif at == "reset":
        again = {}
    return {"lane": FAULTY, "faults": first, "again": again, "pids": str(tmp_path / "pids")}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    def start(
        broker: BrokerThread, env_config: dict[str, Any], recorders: Path = tmp_path, **sampling: Any
    ) -> WorkerThread:
        settings = {"num_envs": 3, "rollout_fragment_length": 8, "seed": 5, "env_restart_attempts": 200}
        sections = {
            "sampling": {
                "env": "support.envs.inline_faults:NowAndThen",
                "env_config": env_config,
                **settings,
                **sampling,
            },
            "worker": {"random_actions_before_weights": True},
        }
        return WorkerThread(monkeypatch, broker.endpoints.worker, recorders, sections)

    return start


@pytest.fixture(scope="module")
def sound() -> dict[int, list[Any]]:
    """The lives of the same worker's lanes without any fault. The first test that needs them fills the dict."""
    return {}


@pytest.fixture
def expected(sound: dict[int, list[Any]], run: Run, start_broker: StartBroker, tmp_path: Path) -> dict[int, list[Any]]:
    if not sound:
        folder = tmp_path / "sound"
        folder.mkdir()
        broker = start_broker(run_dir=folder)
        lives = lives_of(broker, run(broker, {}, folder), (0, FAULTY, 2))
        sound.update({lane: brief(life) for lane, life in lives.items()})
        broker.stop()
    return sound


@pytest.fixture(autouse=True)
def no_children() -> Iterator[None]:
    yield
    inline_faults.end_children()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("at", "fault", "reason"),
    [
        *(("step", fault, "env_bad_data") for fault in BAD_DATA),
        ("step", "raises", "env_exception"),
        ("step", "asks", "env_exception"),
        *(("step", burden, None) for burden in BURDENS),
        ("reset", "raises", None),
        ("construction", "raises", "env_exception"),
        ("close", "raises", "env_exception"),
    ],
)
def test_a_fault_affects_only_its_env_and_is_counted_under_its_reason(
    at: str,
    fault: str,
    reason: str | None,
    expected: dict[int, list[Any]],
    broker: BrokerThread,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comes_back = at != "construction"
    if not comes_back:
        monkeypatch.setattr(restarts, "BACKOFF_S", 600.0)
    worker = run(broker, _env_config(at, fault, tmp_path))
    lives = lives_of(broker, worker, (0, FAULTY, 2) if comes_back else SIBLINGS)
    for lane in SIBLINGS:
        check_alike(brief(lives[lane]), expected[lane])
    totals = broker.rows()[(0, 1)].totals
    assert set(totals.discarded) <= {reason, "shutdown"}
    assert (totals.env_failures > 0) is ((reason is not None and fault != "asks") or at == "reset")


def test_an_env_that_cannot_be_built_at_first_ends_its_worker_with_a_typed_error(
    broker: BrokerThread, run: Run
) -> None:
    with run(broker, {"lane": FAULTY, "faults": {"construction": "raises"}}) as worker:
        wait_until(lambda: worker.error, "the end of the worker")
    assert isinstance(worker.error, EnvError)
    assert "env 1 ('support.envs.inline_faults:NowAndThen') could not be built: RuntimeError: diverged" in str(
        worker.error
    )

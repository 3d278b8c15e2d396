"""Whatever an env does that its worker survives: the siblings are the same to the bit, the env comes back or waits, the
worker drains, and the books name every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import inline_faults
import pytest
from parties import BrokerThread, StartBroker, until
from test_worker import WorkerThread, closed_row

from headrace.learner_stub import EpisodeStream
from headrace.schemas.chunk import ChunkEnd, EpisodeChunk
from headrace.schemas.errors import EnvError
from headrace.schemas.ledger import add_up

FAULTY, SIBLINGS = 1, (0, 2)
ENOUGH = 96
"""Steps of a lane after which a test has seen enough."""

BAD_DATA = [
    "NaN reward",
    "infinite reward",
    "complex reward",
    "array reward",
    "list info",
    "observation of wrong shape",
    "observation of wrong dtype",
    "observation outside",
    "wrong tuple",
]

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
        settings = {"num_envs": 3, "rollout_fragment_length": 8, "seed": 5, "max_env_restarts_per_window": 10_000}
        sections = {
            "sampling": {"env": "inline_faults:NowAndThen", "env_config": env_config, **settings, **sampling},
            "worker": {"random_actions_before_weights": True, "drain_timeout_s": 5.0},
        }
        return WorkerThread(monkeypatch, broker.endpoints.worker, recorders, sections)

    return start


def _lives(broker: BrokerThread, worker: WorkerThread, lanes: tuple[int, ...]) -> dict[int, list[EpisodeChunk]]:
    """All chunks by lane, of a run until each of `lanes` has made enough steps, and of the drain after it."""
    lives: dict[int, list[EpisodeChunk]] = defaultdict(list)
    with EpisodeStream(broker.endpoints.learner) as stream, worker:

        def take() -> None:
            for chunk in stream.next(0.05) or ():
                lives[chunk.env_index].append(chunk)

        def has_enough() -> bool:
            take()
            return all(sum(map(len, lives[lane])) >= ENOUGH for lane in lanes)

        until(has_enough, "enough steps of every env")
        worker.stopping.set()

        def has_drained() -> bool:
            take()
            row = broker.rows()[(0, 1)]
            return row.closed and row.held == (0, 0)

        until(has_drained, "the end of the worker's books")
        row = closed_row(broker)
    assert worker.error is None
    assert row.totals.open == 0
    assert add_up(broker.rows()).balance() == 0
    assert row.settled.committed[0] == sum(len(chunk) for life in lives.values() for chunk in life)
    return lives


def _brief(life: list[EpisodeChunk]) -> list[Any]:
    return [
        (c.episode_id, c.chunk_index, c.t_start, c.end, c.obs.tobytes(), c.actions.tobytes(), c.rewards.tobytes())
        for c in life
        if c.end is not ChunkEnd.ABORTED
    ]


@pytest.fixture(scope="module")
def sound() -> dict[int, list[Any]]:
    """What the lanes of the same worker live through without any fault; filled by the first test that needs it."""
    return {}


@pytest.fixture
def expected(sound: dict[int, list[Any]], run: Run, start_broker: StartBroker, tmp_path: Path) -> dict[int, list[Any]]:
    if not sound:
        folder = tmp_path / "sound"
        folder.mkdir()
        broker = start_broker(run_dir=folder)
        lives = _lives(broker, run(broker, {}, folder), (0, FAULTY, 2))
        sound.update({lane: _brief(life) for lane, life in lives.items()})
        broker.stop()
    return sound


@pytest.fixture(autouse=True)
def no_children() -> Iterator[None]:
    yield
    inline_faults.end_children()


@pytest.mark.parametrize(
    ("at", "fault", "reason"),
    [
        *(("step", fault, "env_bad_data") for fault in BAD_DATA),
        ("step", "raises", "env_exception"),
        ("step", "asks", "env_exception"),
        ("step", "floods", None),
        ("step", "leaves a child", None),
        ("reset", "raises", None),
        ("construction", "raises", "env_exception"),
        ("close", "raises", "env_exception"),
    ],
)
def test_a_fault_costs_its_env_only_and_has_its_name(
    at: str,
    fault: str,
    reason: str | None,
    expected: dict[int, list[Any]],
    broker: BrokerThread,
    run: Run,
    tmp_path: Path,
) -> None:
    waits = {"env_restart_backoff_s": 600.0, "env_restart_backoff_max_s": 600.0} if at == "construction" else {}
    comes_back = at != "construction"
    worker = run(broker, _env_config(at, fault, tmp_path), **waits)
    lives = _lives(broker, worker, (0, FAULTY, 2) if comes_back else SIBLINGS)
    for lane in SIBLINGS:
        found = _brief(lives[lane])
        shorter = min(len(found), len(expected[lane]))
        assert shorter * 8 >= ENOUGH // 2
        assert found[:shorter] == expected[lane][:shorter]
    totals = broker.rows()[(0, 1)].totals
    assert set(totals.discarded) <= {reason, "shutdown"}
    assert (totals.env_failures > 0) is ((reason is not None and fault != "asks") or at == "reset")


def test_an_env_that_cannot_be_built_at_first_ends_its_worker_with_a_typed_error(
    broker: BrokerThread, run: Run
) -> None:
    with run(broker, {"lane": FAULTY, "faults": {"construction": "raises"}}) as worker:
        until(lambda: worker.error, "the end of the worker")
    assert isinstance(worker.error, EnvError)
    assert "env 1 ('inline_faults:NowAndThen') could not be built: RuntimeError: diverged" in str(worker.error)

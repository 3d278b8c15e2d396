"""A user's own learner with a run directory: it waits for the fleet, finds it again, and ends with it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from headrace.deploy import load_policy
from headrace.learner_stub import EpisodeStream, LearnerState, StreamDataset, TaskPublisher, WeightPublisher
from headrace.learner_stub.link.fleet_place import await_start, find_fleet, keys_folder
from headrace.schemas.errors import UnreachableError
from support.fleets.running_fleet import RunningFleet
from support.waiting import TIMEOUT_S

LEARNER = """
import logging, sys
from headrace.learner_stub import EpisodeStream, WeightPublisher, save_policy
from headrace.workers.modules import actor_critic

logging.basicConfig(level="INFO", stream=sys.stderr)
with EpisodeStream.of(sys.argv[1], connect_timeout_s=150.0) as stream, WeightPublisher.of(sys.argv[1]) as weights:
    module = actor_critic(stream.spaces())
    weights.publish(module.state_dict())
    for batch in stream:
        print(stream.endpoint, batch.incarnation, flush=True)
        weights.publish(module.state_dict())
    save_policy(sys.argv[1], module.state_dict(), updates=weights.seq, epoch=stream.epoch)
print("the loop has ended", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_learner_waits_for_its_fleet_goes_on_with_the_next_one_and_ends_with_it(tmp_path: Path) -> None:
    run_dir, heard = tmp_path / "run", tmp_path / "heard"
    settings = ("--env", "CartPole-v1", "--workers", "1", "--num-envs", "2", "--set", "learner.enabled=false")
    with ExitStack() as stack:
        words = stack.enter_context((tmp_path / "words").open("wb"))
        lines = stack.enter_context(heard.open("wb"))
        learner = subprocess.Popen([sys.executable, "-c", LEARNER, str(run_dir)], stdout=lines, stderr=words)
        stack.callback(learner.kill)
        for _ in range(2):
            with RunningFleet(run_dir, *settings) as fleet:
                fleet.wait_until(lambda: fleet.pid("worker"), "a worker")

                def has_batches() -> bool:
                    assert learner.poll() is None, (tmp_path / "words").read_text()
                    at = f"{fleet.endpoint('learner')} "
                    return any(line.startswith(at) for line in heard.read_text().splitlines())

                fleet.wait_until(has_batches, "batches at the learner")
        assert learner.wait(100) == 0, (tmp_path / "words").read_text()
    assert heard.read_text().splitlines()[-1] == "the loop has ended"
    said = (tmp_path / "words").read_text()
    end = rf"the stream ends: the fleet in {run_dir} was stopped at \S+ \S+ after [\d,]+ env steps; go on with `headr"
    assert re.search(end, said)
    assert said.count("the stream ends: ") == 1

    evaluate = [sys.executable, "-m", "headrace.deploy", "evaluate", str(run_dir), "--episodes", "3", "--json"]
    played = subprocess.run(evaluate, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert played.returncode == 0, played.stderr
    assert orjson.loads(played.stdout)["episodes"] == 3
    policy = load_policy(run_dir)
    assert policy.act(np.zeros(4, np.float32)) in (0, 1)
    assert policy.version[1] > 2


def _write(run_dir: Path, name: str, content: object) -> None:
    (run_dir / name).write_bytes(orjson.dumps(content))


def _broker(run_dir: Path, endpoint: str) -> None:
    _write(run_dir, "broker.json", {"endpoints": {"learner": endpoint}})


def test_a_fleet_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        UnreachableError,
        match=r"^no broker is found within 0.2 s: .* has no broker yet: start it with `headrace up --run-dir",
    ):
        find_fleet(tmp_path, 0.2, {})
    _broker(tmp_path, "tcp://127.0.0.1:0")
    with pytest.raises(UnreachableError):
        find_fleet(tmp_path, 0.2, {})
    _broker(tmp_path, "tcp://127.0.0.1:9")
    assert find_fleet(str(tmp_path), 0.2, {})[0] == "tcp://127.0.0.1:9"
    _write(tmp_path, "fleet.json", {"state": "stopped"})
    assert find_fleet(str(tmp_path), 0.2, {})[0] == "tcp://127.0.0.1:9"
    with pytest.raises(UnreachableError, match="was stopped; go on with `headrace up --resume "):
        await_start(tmp_path, 0.2)


def test_a_learner_that_waits_for_a_stopped_run_logs_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _broker(tmp_path, "tcp://127.0.0.1:9")
    _write(tmp_path, "fleet.json", {"state": "stopped"})
    with pytest.raises(UnreachableError):
        EpisodeStream.of(tmp_path, connect_timeout_s=0.3)
    said = f"the fleet in {tmp_path} was stopped; go on with `headrace up --resume {tmp_path}`; waiting for it"
    assert len([message for message in caplog.messages if message.startswith(said)]) == 1


LATE: dict[str, Callable[..., Any]] = {
    "a stream": EpisodeStream.of,
    "a stream of a group": partial(EpisodeStream.of, group="record"),
    "rank 1": partial(EpisodeStream.of, rank=1, world_size=2),
    "a publisher": WeightPublisher.of,
    "a publisher of tasks": TaskPublisher.of,
    "the learner's state": LearnerState.of,
    "a dataset": lambda run, **options: next(iter(StreamDataset(run, **options))),
}


@pytest.mark.parametrize("kind", LATE)
def test_a_learner_that_comes_after_the_goal_is_told_so_and_how_to_go_on(tmp_path: Path, kind: str) -> None:
    _broker(tmp_path, "tcp://127.0.0.1:9")
    _write(tmp_path, "fleet.json", {"state": "stopped", "at_goal": True, "ended": 1.5e9, "env_steps": 60_032})
    said = rf"^the fleet in {tmp_path} reached its goal at 2017-\S+ \S+ after 60,032 env steps; go on with `headrace up"
    with pytest.raises(UnreachableError, match=said):
        LATE[kind](tmp_path, connect_timeout_s=0.3)


def test_a_learner_takes_the_keys_folder_of_the_fleets_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_folder(tmp_path) is None
    _write(tmp_path, "config.json", {"keys": {"dir": "/keys"}})
    assert keys_folder(tmp_path) == "/keys"
    monkeypatch.setenv("HEADRACE_KEYS__DIR", "/others")
    assert keys_folder(tmp_path) is None
    (tmp_path / "config.json").write_text("no json")
    assert keys_folder(tmp_path) is None

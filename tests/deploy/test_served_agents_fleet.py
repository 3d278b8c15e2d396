"""`headrace up --serve` for episodes of several agents, which programs elsewhere drive."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import orjson
import pytest

from support.fleets.served_cartpole import endpoint_of

pytestmark = pytest.mark.slow

TWO_CARTS = ("--env", "headrace.workers.agents.examples:two_carts", "--workers", "1", "--num-envs", "8")
POLICIES = ("--set", 'sampling.policies={"short": {}, "long": {}}')


@contextmanager
def playing(told: IO[bytes], *program: str) -> Iterator[None]:
    """Four games, for as long as this lasts."""
    with subprocess.Popen([sys.executable, "-u", *program, "4"], stdout=told, stderr=subprocess.DEVNULL) as games:
        try:
            yield
        finally:
            games.kill()


@pytest.mark.thorough
def test_two_policies_train_on_games_over_zmq_and_http_and_books_balance(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace.deploy", "up", *TWO_CARTS, *POLICIES, "--serve", "--seed", "0", "--json"]
    command += ["--set", "serving.http_port=0", "--set", "learner.steps_per_update=512", "--run-dir", str(tmp_path)]
    command += ["--until-steps", "2000", "--timeout-s", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as fleet:
        try:
            by_zmq, by_http = (endpoint_of(tmp_path / "fleet.json", way, fleet) for way in ("zmq", "http"))
            plain = ("-m", "support.fleets.two_carts_by_http", by_http, "1000000")
            ours = ("-m", "support.fleets.play_two_carts", by_zmq)
            with (tmp_path / "played").open("wb") as file, playing(file, *plain), playing(file, *ours):
                told, _ = fleet.communicate()
        finally:
            fleet.terminate()
    found = orjson.loads(told)
    assert (found["exit_code"], found["goal_reached"], found["balanced"]) == (0, True, True)
    assert found["restarts"]["worker"] == 0
    assert found["env_steps"] < found["steps"] == found["ledger"]["stepped"]
    assert set(found["ledger"]["discarded"]) <= {"client_lost", "shutdown"}
    assert found["weights_seq"] > 1
    played = [orjson.loads(line) for line in (tmp_path / "played").read_text().splitlines(True) if line.endswith("}\n")]
    assert any(game["short"] != game["long"] for game in played)

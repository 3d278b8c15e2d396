"""`headrace up` whose episodes are driven by a program that knows the client and nothing else of Headrace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.fleets.served_cartpole import train

pytestmark = pytest.mark.slow


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("way", "goal"), [("zmq", ("--until-return", "30")), ("http", ("--until-steps", "400"))])
def test_episodes_of_clients_are_trained_on_and_books_have_the_steps_of_a_killed_client(
    tmp_path: Path, way: str, goal: tuple[str, str]
) -> None:
    settings = (
        "--set",
        "learner.steps_per_update=256",
        "--set",
        "serving.lease_s=6",
        "--set",
        "sampling.external_fragment_max_age_s=30",
    )
    found = train(way, tmp_path, *goal, "--timeout-s", "180", *settings, lost_games=4)
    assert (found["exit_code"], found["goal_reached"], found["balanced"]) == (0, True, True)
    assert found["restarts"]["worker"] == 0
    assert found["ledger"]["stepped"] >= 400
    assert found["ledger"]["committed"][0] > 0
    assert found["weights_seq"] > 1
    told = re.findall(r"is gone: client_lost; (\d+) steps discarded", (tmp_path / "logs" / "worker-0.log").read_text())
    assert found["ledger"]["discarded"]["client_lost"] == sum(map(int, told)) > 0
    assert set(found["ledger"]["discarded"]) <= {"client_lost", "shutdown"}

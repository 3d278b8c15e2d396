"""`headrace up` whose episodes are driven by a program that knows the client and nothing else of Headrace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

pytestmark = pytest.mark.slow

CARTS = """
import sys, threading
import gymnasium
from headrace.workers.policy_client import PolicyClient

def drive(seed):
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    while True:
        episode, over = client.start_episode(), False
        while not over:
            observation, reward, terminated, truncated, _ = env.step(int(client.get_action(episode, observation)))
            client.log_returns(episode, reward)
            over = terminated or truncated
        client.end_episode(episode, observation, truncated=not terminated)
        observation, _ = env.reset()

client = PolicyClient(sys.argv[1])
for seed in range(4):
    threading.Thread(target=drive, args=(seed,), daemon=True).start()
sys.stdin.read()
"""


def test_what_clients_elsewhere_live_through_is_trained_on_and_stands_in_the_books(
    tmp_path: Path, free_port: int, wait_for: Callable[..., None]
) -> None:
    command = [sys.executable, "-m", "headrace.deploy", "up", "--run-dir", str(tmp_path), "--env", "CartPole-v1"]
    command += ["--workers", "1", "--num-envs", "4", "--until-steps", "300", "--timeout-s", "60", "--json"]
    for setting in ("serving.enabled=true", f"serving.port={free_port}", "learner.steps_per_update=128"):
        command += ["--set", setting]
    fleet = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    fleet_json = tmp_path / "fleet.json"
    with fleet:
        try:
            wait_for(lambda: fleet_json.exists() and b"clients-0" in fleet_json.read_bytes(), what="the endpoints")
            endpoint = orjson.loads(fleet_json.read_bytes())["endpoints"]["clients-0"]
            assert endpoint == f"tcp://127.0.0.1:{free_port}"
            carts = subprocess.Popen([sys.executable, "-c", CARTS, endpoint], stdin=subprocess.PIPE)
            with carts:
                told, _ = fleet.communicate(timeout=80)
                carts.kill()
        finally:
            fleet.terminate()
    found = orjson.loads(told)
    assert (found["exit_code"], found["goal_reached"], found["balanced"]) == (0, True, True)
    assert found["ledger"]["stepped"] >= 300
    assert found["ledger"]["committed"][0] > 0
    assert found["weights_seq"] > 1

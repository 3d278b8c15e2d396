"""`headrace up` with episodes that other programs drive and act in; one of the programs is killed while it plays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from headrace.schemas.peers.socket_folder import endpoint_of, make_socket_folder
from support.waiting import TIMEOUT_S

pytestmark = pytest.mark.slow

CARTS = """
import sys
import gymnasium
from headrace.workers import EnvRunnerConfig
from headrace.workers.serving.acting import ActingClient

config = EnvRunnerConfig(num_envs=2, rollout_fragment_length=16, external_fragment_max_age_s=0.2)
client = ActingClient(sys.argv[1], config, index=int(sys.argv[2]), update_interval_s=0.1)
env = gymnasium.make("CartPole-v1")
while True:
    (observation, _), episode, over = env.reset(), client.start_episode(), False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(int(client.get_action(episode, observation)))
        client.log_returns(episode, float(reward))
        over = terminated or truncated
    client.end_episode(episode, observation, truncated=not terminated)
    print("played", flush=True)
    sys.stdin.readline()  # until both have played: one alone may reach the goal
"""


@pytest.mark.thorough
def test_client_fragments_train_and_books_balance_though_a_client_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace.deploy", "up", "--run-dir", str(tmp_path), "--env", "CartPole-v1"]
    command += ["--workers", "1", "--num-envs", "2", "--until-steps", "600", "--timeout-s", "180", "--json"]
    settings = ("enabled=true", "lease_s=2", "client_inference=true")
    for setting in (*(f"serving.{each}" for each in settings), "learner.steps_per_update=128"):
        command += ["--set", setting]
    endpoint = endpoint_of(make_socket_folder(tmp_path), "clients-0")
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", CARTS, endpoint, str(index)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for index in range(2)
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as fleet:
        try:
            for client in clients:
                assert client.stdout is not None
                assert client.stdout.readline() == b"played\n"
            for client in clients:
                assert client.stdin is not None
                client.stdin.close()
            assert clients[0].stdout is not None
            assert clients[0].stdout.readline() == b"played\n"
            clients[0].kill()
            told, _ = fleet.communicate(timeout=TIMEOUT_S)
        finally:
            fleet.terminate()
            for client in clients:
                with client:
                    client.kill()
    found = orjson.loads(told)
    assert (found["exit_code"], found["goal_reached"], found["balanced"]) == (0, True, True)
    assert found["ledger"]["stepped"] == found["env_steps"] >= 600
    assert found["ledger"]["committed"][0] > 0
    assert found["episodes"] > 5
    assert found["weights_seq"] > 1

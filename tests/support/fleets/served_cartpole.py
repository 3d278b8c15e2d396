"""A fleet that learns CartPole from games played by a program that knows its client and nothing else of Headrace.

    PYTHONPATH=tests python -m support.fleets.served_cartpole zmq|http [RETURN]

trains until the mean return, and prints what it came to.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import orjson

from headrace.schemas.accounts.recorder import read_recorder
from support.waiting import wait_until

GAMES = 8
ENDPOINTS = {"zmq": "clients-0", "http": "http-0"}


def train(way: str, run_dir: Path, *goal: str, lost_games: int = 0) -> dict[str, Any]:
    """Run `headrace up --serve` until its goal, while games are played at it. Return its summary.

    Before these games, a client of `lost_games` others is killed while it plays.
    """
    command = [sys.executable, "-m", "headrace.deploy", "up", "--env", "CartPole-v1", "--workers", "1", "--serve"]
    command += ["--num-envs", str(GAMES), "--seed", "0", "--run-dir", str(run_dir), "--json", *goal]
    command += ["--set", "serving.http_port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as fleet:
        try:
            endpoint = endpoint_of(run_dir / "fleet.json", way, fleet)
            where = str(run_dir / "rendezvous.json") if way == "zmq" else endpoint
            if lost_games:
                health = endpoint_of(run_dir / "fleet.json", "http", fleet) + "/v1/health"
                _kill_a_client(where, lost_games, run_dir, health)
            with _games(where, GAMES) as games:
                try:
                    told, _ = fleet.communicate()
                finally:
                    games.kill()
        finally:
            fleet.terminate()
    summary: dict[str, Any] = orjson.loads(told)
    return summary


def _kill_a_client(where: str, games: int, run_dir: Path, health: str) -> None:
    """Start a client, kill it while it plays, and return once its worker has given its sessions up."""
    recorder = run_dir / "recorders" / "worker-0-1.rec"

    def sessions() -> int:
        with urllib.request.urlopen(health) as answer:
            return int(orjson.loads(answer.read())["sessions"])

    with _games(where, games) as client:
        wait_until(lambda: (read := read_recorder(recorder)) and read.totals.stepped > 100, "steps of the client")
        assert sessions() > 0
        client.kill()
    wait_until(lambda: sessions() == 0, "the end of the client's lease", pause_s=0.2)


def _games(endpoint: str, count: int) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "headrace.deploy.clients.cartpole", endpoint, str(count)]
    # At the end its server is gone, and it says so.
    return subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def endpoint_of(fleet_json: Path, way: str, fleet: subprocess.Popen[bytes]) -> str:
    """Where clients of the worker of slot 0 come, once that stands in `fleet_json`."""

    def find() -> str:
        assert fleet.poll() is None, "the fleet has ended"
        found = orjson.loads(fleet_json.read_bytes())["endpoints"] if fleet_json.exists() else {}
        return str(found.get(ENDPOINTS[way], ""))

    return wait_until(find, "an endpoint for clients")


def main(way: str, until_return: str = "475") -> None:
    """Train, and print the summary."""
    with tempfile.TemporaryDirectory() as folder:
        summary = train(way, Path(folder), "--until-return", until_return, "--timeout-s", "1800")
    sys.stdout.write(orjson.dumps(summary, option=orjson.OPT_INDENT_2).decode() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

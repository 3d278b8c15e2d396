"""Clients in other languages play real episodes with a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.serving.plain_episodes import rule
from support.serving.served import Served
from support.waiting import TIMEOUT_S

CLIENTS = Path(__file__).parents[2] / "deploy" / "clients"
TOKEN = "a-token-of-this-server"


@pytest.fixture
def server() -> Iterator[Served]:
    with Served(token=TOKEN) as served:
        yield served


def played(server: Served, command: list[str]) -> None:
    """The client's own account of its episodes is the server's."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert [episode["number"] for episode in told] == [0, 1, 2]
    for episode in told:
        kept = server.episodes.episodes[episode["episode"]]
        assert episode["actions"] == kept.actions == [rule([counter, 1]) for counter in range(4)]
        assert (kept.seen, kept.rewards, kept.end) == ([0, 1, 2, 3, 4], [0, 0, 1, 2, 3], "terminated")
    assert server.counts() == {"sessions": 0, "episodes": 0, "remembered": 0}


def test_the_python_client_of_the_standard_library_plays(server: Served) -> None:
    played(server, [sys.executable, "-I", "-S", str(CLIENTS / "http_client.py"), server.url, "3", TOKEN])


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_client_for_node_plays(server: Served) -> None:
    played(server, ["node", str(CLIENTS / "http_client.mjs"), server.url, "3", TOKEN])


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_client_in_c_plays(server: Served, tmp_path: Path) -> None:
    warnings = ["-Wall", "-Wextra", "-Werror", "-std=gnu11"]
    subprocess.run(["cc", *warnings, "-o", str(tmp_path / "client"), str(CLIENTS / "http_client.c")], check=True)
    address = urlsplit(server.url)
    played(server, [str(tmp_path / "client"), str(address.hostname), str(address.port), "3", TOKEN])


@pytest.mark.parametrize("token", ["", "another"])
def test_without_the_servers_token_a_client_is_refused(server: Served, token: str) -> None:
    command = [sys.executable, "-I", str(CLIENTS / "http_client.py"), server.url, "1", token]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert result.returncode == 1
    assert "unauthorized: show the server's token" in result.stderr
    assert not server.episodes.episodes

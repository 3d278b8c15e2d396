"""No text of envs, peers and files reaches a terminal as it is, by any command."""

from __future__ import annotations

import re
import subprocess
import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer
from command_reference import commands
from redis import Redis

from headrace.deploy.command.cli import app
from headrace.deploy.report.audit import find_books
from headrace.deploy.run.redis_server import serving
from support.envs.hostile import HOSTILE
from support.waiting import TIMEOUT_S

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ENV = "support.envs.hostile:Hostile"
FREE = {"host", "program", "message", "exception", "where", "traceback", "last_words", "doing", "error", "env_failure"}
"""Fields whose text another process, another host or a user's code chooses."""

READERS: Mapping[str, tuple[str, ...]] = {
    "audit": ("{run}",),
    "audit --json": ("{run}",),
    "audit --deep": ("{run}",),
    "evaluate": ("{run}", "--episodes", "2"),
    "export": ("{run}", "--to", "{run}/policy.pt"),
    "groups list": ("--run-dir", "{run}"),
    "groups remove": ("nobody", "--run-dir", "{run}"),
    "health": ("--run-dir", "{run}"),
    "ps": ("--run-dir", "{run}"),
    "ps --json": ("--run-dir", "{run}"),
    "record": ("{run}", "--out", "{run}/again"),
    "redis forget": ("--run-dir", "{run}"),
    "replay": ("{recording}", "--render", "{run}/film.mp4", "--run-dir", "{run}"),
    "report": ("{run}", "--out", "-"),
    "rerun": ("{run}",),
    "rerun --list": ("{run}",),
    "scale": ("2", "--run-dir", "{run}"),
    "slurm status": ("--run-dir", "{run}"),
    "top": ("--once", "--run-dir", "{run}"),
    "top --json": ("--run-dir", "{run}"),
    "up": ("--resume", "{run}", "--until-steps", "8000", "--no-dashboard"),
    "why": ("{run}",),
    "why --json": ("{run}",),
}
REST = "keys,worker,broker,learner,env-host,dashboard,exporter,chaos,doctor,serve,ray,slurm"
"""Commands that serve until they are stopped, or read no run."""


def test_every_command_is_tried_or_reads_no_run() -> None:
    names = {name.removeprefix("headrace ") for name, _ in commands(typer.main.get_command(app))}
    tried = {name.partition(" --")[0] for name in READERS}
    assert {name for name in names if name.split()[0] not in REST.split(",")} <= tried <= names


def found(text: str) -> list[str]:
    """Each character that a terminal obeys."""
    is_bidi = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
    return [
        repr(one) for one in text if (unicodedata.category(one) == "Cc" and one not in "\n\t") or is_bidi.match(one)
    ]


def poisoned(value: Any) -> Any:
    """The same with a hostile text in each free field."""
    if isinstance(value, list):
        return [poisoned(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: HOSTILE if key in FREE and isinstance(one, str) else poisoned(one) for key, one in value.items()}


def poison(run: Path) -> None:
    for path in (*run.glob("*.json"), *run.glob("*.jsonl"), *run.glob("logs/*.log")):
        lines = path.read_bytes().splitlines() if path.suffix != ".json" else [path.read_bytes()]
        path.write_bytes(
            b"\n".join(orjson.dumps(poisoned(orjson.loads(one))) if one[:1] == b"{" else one for one in lines)
        )
    url, _ = find_books(run)
    with serving(run, url), Redis.from_url(url, protocol=2) as client:
        for key in client.scan_iter():
            if client.type(key) != b"hash":
                continue
            for field, value in client.hgetall(key).items():
                if field.decode() in FREE:
                    client.hset(key, field, HOSTILE)
                elif value[:1] == b"{":
                    client.hset(key, field, orjson.dumps(poisoned(orjson.loads(value))))


def headrace(*words: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "headrace.deploy", *words]
    return subprocess.run(command, capture_output=True, check=False, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of a hostile env, whose files and Redis then get hostile texts, and its recording."""
    root = tmp_path_factory.mktemp("hostile")
    places = {"run": root / "run", "recording": root / "recording"}
    where = ("--run-dir", str(places["run"]), "--record", str(places["recording"]))
    ended = headrace("up", "--env", ENV, "--workers", "1", "--until-steps", "6000", "--no-dashboard", *where)
    assert ended.returncode == 0, ended.stderr.decode()
    assert found((ended.stdout + ended.stderr).decode()) == []
    poison(places["run"])
    return places


@pytest.mark.one_in(4)
@pytest.mark.parametrize("command", READERS)
def test_a_command_prints_no_control_character_of_a_hostile_run(command: str, folders: dict[str, Path]) -> None:
    ended = headrace(*command.split(), *(word.format(**folders) for word in READERS[command]))
    said = (ended.stdout + ended.stderr).decode()
    assert "Traceback (most" not in said.partition("hostile.py")[0]
    assert found(said) == []
    if "--json" in command:
        orjson.loads(ended.stdout)

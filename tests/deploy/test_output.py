"""The amount and the form of a command's output, seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
import typer
from command_reference import commands

from headrace.deploy.command.cli import app
from support.waiting import wait_until

pytestmark = pytest.mark.processes

HEADRACE = [sys.executable, "-m", "headrace.deploy"]


@contextmanager
def broker(run_dir: Path, *options: str) -> Iterator[None]:
    """A broker that runs within the block; its stderr goes to `run_dir`/err, which is no terminal."""
    run_dir.mkdir()
    command = [*HEADRACE, "broker", "--fleet-id", "quiet", "--run-dir", str(run_dir), *options]
    with (run_dir / "err").open("wb") as err, subprocess.Popen(command, stderr=err) as process:
        try:
            wait_until((run_dir / "broker.json").exists, what="the broker's file")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def test_logs_are_text_or_json_or_empty_as_the_options_say(tmp_path: Path) -> None:
    with broker(tmp_path / "text"), broker(tmp_path / "json", "--log-format", "json"), broker(tmp_path / "few", "-q"):
        pass
    text, as_json, few = ((tmp_path / name / "err").read_text() for name in ("text", "json", "few"))
    first = text.splitlines()[0]
    assert " broker headrace " in first
    assert "of fleet quiet" in first
    (begun, *_) = map(orjson.loads, as_json.splitlines())
    assert (begun["role"], begun["level"], begun["fleet"]) == ("broker", "info", "quiet")
    assert few == ""


def test_verbose_and_quiet_together_are_refused() -> None:
    ended = subprocess.run([*HEADRACE, "doctor", "-v", "-q"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "give --verbose or --quiet, not both" in ended.stderr


def test_every_command_has_the_options_of_output() -> None:
    for name, command in commands(typer.main.get_command(app)):
        if name == "headrace ray up":
            assert command.context_settings["ignore_unknown_options"], "it hands them on to `headrace up`"
            continue
        own = {option for parameter in command.params for option in parameter.opts}
        assert own >= {"-v", "-q", "--log-format", "--no-color"}, name


def test_a_shell_completes_commands_and_options() -> None:
    def complete(words: str) -> list[str]:
        environment = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        command = [str(Path(sys.executable).with_name("headrace"))]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
        return ended.stdout.split()

    assert complete("headrace aud") == ["audit"]
    assert "--log-format" in complete("headrace up --log")

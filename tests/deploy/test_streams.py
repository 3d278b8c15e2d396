"""Standard streams whose reader goes away, or whose encoding lacks a character."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
from headrace.deploy.terminal.std_streams import open_std_streams, ignore_closed_reader

open_std_streams()
for line in range(20_000):
    with ignore_closed_reader(sys.stdout):
        print("line", line, flush=True)
print("went on to the end", file=sys.stderr)
"""


def test_a_reader_that_closes_its_pipe_does_not_end_the_writer() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        assert writer.stdout.readline() == b"line 0\n"
        writer.stdout.close()
        assert writer.stderr.read() == b"went on to the end\n"
    assert writer.returncode == 0


def test_characters_that_an_encoding_lacks_are_replaced() -> None:
    script = (
        "from headrace.deploy.terminal.std_streams import open_std_streams; open_std_streams(); print('\\u2713 fine')"
    )
    environment = {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=False)
    assert result.stdout == b"? fine\n", result.stderr


@pytest.mark.parametrize("how", ["sys.stderr.close()", "sys.stderr = Sink()", "sys.stderr = 3"])
def test_an_env_that_closes_or_replaces_stderr_ends_nobody_who_writes_there(how: str) -> None:
    lines = ["import sys", "from headrace.deploy.command.entry import end_process"]
    lines += ["from headrace.deploy.terminal.std_streams import say"]
    lines += ["class Sink:", "    def write(self, text): pass", how, "say('still heard', sys.stderr)", "end_process(0)"]
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.strip()) == (0, "still heard")

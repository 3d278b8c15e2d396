"""The live table of `headrace up` and its log lines on one terminal: neither overwrites the other."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

ROWS, COLUMNS = 40, 100
THREADS, LINES = 3, 100

PROGRAM = f"""
import logging, os, sys, threading
from headrace.deploy.run.goal import Goal, RunNumbers
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.deploy.report.progress import ProgressDisplay, ProgressView

sys.setswitchinterval(1e-6)  # threads take turns often, as on a machine with much to do
set_up_logging(Identity("here", "supervisor"))
log = logging.getLogger("headrace.supervisor")
numbers = RunNumbers()

def tell(thread):
    for number in range({LINES}):
        log.info("thread %d says [line] %03d of a few words", thread, number)

with ProgressDisplay() as progress:
    threads = [threading.Thread(target=tell, args=(number,)) for number in range({THREADS})]
    for thread in threads:
        thread.start()
    shown = 0
    while any(thread.is_alive() for thread in threads) or shown < 20:
        progress.show(ProgressView(seconds=shown, numbers=numbers, goal=Goal(None, None)), last=True)
        shown += 1
    for thread in threads:
        thread.join()
    if "ends amid" in sys.argv:
        os._exit(0)
"""


@pytest.mark.long
@pytest.mark.parametrize("ends", ["ends amid", "ends"])
def test_log_lines_stand_whole_above_a_live_table_that_goes_away_at_the_end(ends: str) -> None:
    lines = shown_on_a_terminal([sys.executable, "-c", PROGRAM, ends])
    said = [line for line in lines if "says" in line]
    assert all(
        re.fullmatch(r"\d\d:\d\d:\d\d supervisor thread \d says \[line\] \d{3} of a few words", line) for line in said
    ), said
    wanted = {f"thread {thread} says [line] {number:03} of" for thread in range(THREADS) for number in range(LINES)}
    assert {re.findall(r"thread .* of", line)[0] for line in said} == wanted
    assert len(said) == len(wanted)
    tables = [number for number, line in enumerate(lines) if line.startswith("env steps")]
    assert len(tables) == (ends == "ends amid")
    assert not tables or not [line for line in lines[tables[0] :] if "says" in line], "the table stands below"
    assert tables or not any(lines[lines.index(said[-1]) + 1 :]), "nothing is left of the table"


def test_a_terminal_that_cannot_move_its_cursor_gets_lines() -> None:
    lines = shown_on_a_terminal([sys.executable, "-c", PROGRAM], term="dumb")
    shown = [line for line in lines if line.startswith("time ")]
    assert len(shown) >= 20
    assert all("env steps 0 (0/s)" in line for line in shown)


def shown_on_a_terminal(command: list[str], term: str = "xterm") -> list[str]:
    """Return the lines that a terminal shows, those that have moved out at its top included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": term}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        output = b""
        try:
            while piece := os.read(ours, 1 << 16):
                output += piece
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(ours)
        assert process.wait(30) == 0, output.decode()
    return _lines(output.decode())


def _lines(output: str) -> list[str]:
    """Follow the few orders that a live table needs: line feed, return, up, and erase a line."""
    lines, row, column = [""], 0, 0
    for order, count, letter, character in re.findall(r"(\x1b\[(\??[\d;]*)([A-Za-z]))|([\s\S])", output):
        if letter == "A":
            row -= int(count or 1)
            assert row >= 0, "above the first line"
        elif letter == "K":
            assert count == "2", order
            lines[row] = ""
        elif letter:
            assert letter in "mhl", order
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]

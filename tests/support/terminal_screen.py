"""A program on a real pseudo-terminal, and what a person would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import unicodedata
from pathlib import Path
from typing import Any

from support.waiting import wait_until

_SEQUENCE = re.compile(r"\x1b\[(\?)?([\d;]*)([A-Za-z])")


class Screen:
    """The lines of a terminal, as far as our own programs move its cursor."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.is_other = False
        """True between the sequences that enter and leave the terminal's other screen."""
        self.overflows: list[str] = []
        """Texts that did not fit their line."""
        self.colours: set[str] = set()
        """Parameters of the sequences that set colours."""
        self._cells: dict[int, list[str]] = {}
        self._row = self._column = 0
        self._rest = ""

    def feed(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _SEQUENCE.match(text, at)
                if found is None:
                    self._rest = text[at:]
                    return
                self._obey(*found.groups())
                at = found.end()
                continue
            if text[at] == "\n":
                self._row, self._column = self._row + 1, 0
            elif text[at] != "\r":
                line = self._cells.setdefault(self._row, [])
                line[self._column : self._column + 1] = [text[at]]
                self._column += 1
                if _width(line) > self.columns:
                    self.overflows.append("".join(line))
                    del line[self.columns :]
            at += 1

    def resize(self, columns: int, lines: int) -> None:
        """Cut off what has no room any more."""
        self.columns, self.lines = columns, lines
        self._cells = {row: line[:columns] for row, line in self._cells.items() if row < lines}

    def _obey(self, private: str | None, parameters: str, letter: str) -> None:
        if private and parameters == "1049":
            self.is_other, self._cells = letter == "h", {}
        elif letter == "H":
            self._row, self._column = int((parameters or "1").split(";")[0]) - 1, 0
            if self._row >= self.lines:
                self.overflows.append(f"line {self._row}")
        elif letter == "J":
            self._cells = {}
        elif letter == "m" and any(30 <= int(part or 0) <= 49 for part in parameters.split(";")):
            self.colours.add(parameters)

    def text(self) -> str:
        cells = {row: line for row, line in self._cells.items() if row < self.lines}
        return "\n".join("".join(cells.get(row, [])) for row in range(max(cells, default=0) + 1))


def _width(cells: list[str]) -> int:
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in cells)


class OnTerminal:
    """A command on a pseudo-terminal of its own; use as a context manager."""

    def __init__(self, command: list[str], columns: int = 80, lines: int = 24, cwd: Path | None = None, **env: str):
        self.screen = Screen(columns, lines)
        self._master, slave = pty.openpty()
        self._set_size(slave, columns, lines)
        self.modes_before = termios.tcgetattr(slave)
        self._slave = slave
        # COLUMNS and LINES, as test runners set them, would hide the terminal's own size.
        own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={**own, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1", **env},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        os.close(self._slave)
        self._thread.join(10)
        os.close(self._master)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Change the size as a window manager does: the kernel sends SIGWINCH."""
        self.screen.resize(columns, lines)
        self._set_size(self._master, columns, lines)

    def shows(self, part: str) -> str:
        """Return the screen once `part` is on it."""

        def look() -> str:
            text = self.screen.text()
            return text if part in text else ""

        try:
            return wait_until(look, f"{part!r} on the screen", pause_s=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}; it shows:\n{self.screen.text()}") from None

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    def _set_size(self, descriptor: int, columns: int, lines: int) -> None:
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:
                return
            if not data:
                return
            self.screen.feed(data.decode(errors="replace"))

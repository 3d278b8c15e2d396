"""A full-screen terminal view with keys: the alternate screen, single key presses, and the old state at the end.

The terminal is restored after every end that a process can notice: return, exception, Ctrl-C, SIGTERM, SIGHUP. Ctrl-Z
restores it until `fg`.
"""

from __future__ import annotations

import codecs
import os
import select
import signal
import socket
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType
from typing import Any

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""The other screen, no cursor, no line wrap."""
_LEAVE = "\x1b[?7h\x1b[0m\x1b[?25h\x1b[?1049l"
_ESCAPE_S = 0.1
"""After an escape alone, the rest of a key's sequence comes within this time, also over ssh."""

_BY_LETTER = {"A": "up", "B": "down", "C": "right", "D": "left", "H": "home", "F": "end"}
KEYS = {f"\x1b{lead}{letter}": name for lead in "[O" for letter, name in _BY_LETTER.items()} | {
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[1~": "home",
    "\x1b[4~": "end",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
}
"""Names of keys by the bytes that a terminal sends for them."""


class KeyParser:
    """Turns the bytes from a terminal into names of keys. A printable character is its own name."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    @property
    def waits(self) -> bool:
        """Return whether an escape sequence has begun. It may also be the escape key alone."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """Return the keys that are complete now."""
        text, keys = self._rest + self._decoder.decode(data), []
        self._rest = ""
        while text:
            sequence = _sequence(text)
            if sequence is None:
                self._rest = text
                break
            text = text[len(sequence) :]
            if name := KEYS.get(sequence, sequence if sequence.isprintable() else ""):
                keys.append(name)
        return keys

    def flush(self) -> list[str]:
        """Return the escape key if a sequence has begun and was not completed."""
        rest, self._rest = self._rest, ""
        return [KEYS["\x1b"]] if rest else []


def _sequence(text: str) -> str | None:
    """Return the first key's characters; None if more must come."""
    if text[0] != "\x1b":
        return text[0]
    if len(text) == 1:
        return None
    if text[1] not in "[O":
        return text[0]
    for end in range(2, len(text)):
        if "@" <= text[end] <= "~":
            return text[: end + 1]
    return None if len(text) < 16 else text


class Terminal:
    """The terminal of this process within `with`, in the main thread. Stdin and stdout must be terminals."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._keys = KeyParser()
        self._old: list[Any] = []
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._shown: Sequence[str] = ()
        self._is_closed = False

    def __enter__(self) -> Terminal:
        self._old = termios.tcgetattr(self._in)
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number, handler in (
            (signal.SIGINT, self._end),
            (signal.SIGTERM, self._end),
            (signal.SIGHUP, self._end),
            (signal.SIGTSTP, self._pause),
            (signal.SIGWINCH, self._forget),
            (signal.SIGCONT, self._forget),
        ):
            self._before[number] = signal.signal(number, handler)
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    @property
    def size(self) -> tuple[int, int]:
        """Return the present (columns, lines)."""
        try:
            columns, lines = os.get_terminal_size(self._out)
        except OSError:
            return 80, 24
        return columns or 80, lines or 24

    def notify(self) -> None:
        """Let `read_keys` return soon. Any thread may call it."""
        try:
            self._writer.send(b"\0")
        except OSError:
            return  # the socket is full, so `read_keys` returns soon, or it is closed

    def read_keys(self, timeout_s: float) -> list[str] | None:
        """Return the pressed keys. Wait until a key, a call of `notify`, a new size or the timeout comes.

        Return None once the terminal is gone.
        """
        timeout_s = _ESCAPE_S if self._keys.waits else timeout_s
        ready, _, _ = select.select([self._in, self._reader], [], [], timeout_s)
        if self._reader in ready:
            self._empty()
        if self._in not in ready:
            return self._keys.flush() if self._keys.waits and not ready else []
        try:
            data = os.read(self._in, 4096)
        except OSError:
            return None
        return self._keys.feed(data) if data else None

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines, which must fit the size. Write only lines that have changed."""
        parts = []
        if len(lines) != len(self._shown):
            self._shown = ()
            parts.append("\x1b[2J")
        for number, line in enumerate(lines):
            if not self._shown or self._shown[number] != line:
                parts.append(f"\x1b[{number + 1};1H\x1b[0m\x1b[2K{line}")
        self._shown = list(lines)
        self._write("".join(parts))

    def _take(self) -> None:
        tty.setcbreak(self._in)
        self._shown = ()
        self._write(_ENTER)

    def _give_back(self) -> None:
        self._write(_LEAVE)
        try:
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._old)
        except termios.error:
            return  # the terminal is gone

    def _write(self, text: str) -> None:
        """Write all of the text. A slow connection may take only a part at a time."""
        data = memoryview(text.encode(sys.stdout.encoding or "utf-8", errors="replace"))
        while data and not self._is_closed:
            try:
                data = data[os.write(self._out, data) :]
            except BlockingIOError:
                select.select([], [self._out], [], 1.0)
            except OSError:
                self._is_closed = True

    def _end(self, number: int, frame: FrameType | None) -> None:
        """Restore the terminal and raise: a signal before the `with` block begins would skip `__exit__`."""
        self._give_back()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Restore the terminal, stop this process, and take the terminal again after SIGCONT."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        # The process is stopped here until SIGCONT.
        signal.signal(signal.SIGTSTP, self._pause)
        self._old = termios.tcgetattr(self._in)
        self._take()

    def _forget(self, number: int, frame: FrameType | None) -> None:
        """Redraw everything at the next `draw`: the size changed, or the shell wrote to the screen."""
        self._shown = ()

    def _empty(self) -> None:
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            return

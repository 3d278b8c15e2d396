"""`headrace top`: a fleet in a terminal, read again each second; plain text once where there is no terminal."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Sequence

import orjson
from rich.console import Console
from rich.text import Text

from headrace.deploy.monitoring.facts import FactsReader
from headrace.deploy.monitoring.fleet_state import Document, StateReader
from headrace.deploy.monitoring.series import SeriesReader
from headrace.deploy.monitoring.top.terminal import Terminal
from headrace.deploy.monitoring.top.top_view import SHOWN_CURVES, Curves, TopState, blocks_for, plain, press, screen
from headrace.deploy.run.redis_view import FleetView
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.errors import HeadraceError, RedisUnavailableError

INTERVAL_S = 1.0
CURVES_EVERY = 5
"""Reads of the state for one of the curves, which have a value each 5 s."""
PLAIN_WIDTH = 160
_END_S = 5.0


class StateSource:
    """Reads state and curves. One thread at a time."""

    def __init__(self, reader: FactsReader) -> None:
        self._reader = reader
        self._state = StateReader(reader)
        self._view: FleetView | None = None
        self._series: SeriesReader | None = None
        self._reads = 0
        self.curves: Curves = {}

    def read(self) -> Document:
        """Return the state as of now. Waits some seconds at most. Raises what `FactsReader.read` raises."""
        document = self._state.read()
        view = self._reader.view
        if view is not self._view:
            self._view, self._series = view, SeriesReader(view) if view is not None else None
            self._reads = 0
        if self._series is not None and not document["redis"]["error"] and self._reads % CURVES_EVERY == 0:
            try:
                self._series.read()
                self.curves = self._series.series(names=SHOWN_CURVES).curves
            except RedisUnavailableError:
                return document  # the next read reports the failure
        self._reads += 1
        return document


class StateThread:
    """Reads the state each second in a thread of its own: a Redis that hangs must not delay key presses."""

    def __init__(self, source: StateSource, terminal: Terminal) -> None:
        self._source, self._terminal = source, terminal
        self._closing = threading.Event()
        self.newest: tuple[Document, Curves] | None = None
        self.error: HeadraceError | None = None
        self._thread = threading.Thread(target=self._run, name="top-reader", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Waits for a read under way."""
        self._closing.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.newest = (self._source.read(), self._source.curves)
            except HeadraceError as error:
                self.error = error
                self._closing.set()
            self._terminal.notify()
            self._closing.wait(INTERVAL_S)


def top(reader: FactsReader, *, once: bool, as_json: bool) -> None:
    """Show the fleet until q or Ctrl-C. Show it once if `once` is set, or if stdin or stdout is no terminal.

    Raises `RedisContractError`, and `RunDirError` once the run directory was removed.
    """
    source = StateSource(reader)
    if as_json:
        say(orjson.dumps(source.read()).decode())
    elif once or not _is_interactive():
        width = Console().width if sys.stdout.isatty() else PLAIN_WIDTH
        document = source.read()
        lines = plain(document, source.curves, width, blocks_for(sys.stdout.encoding))
        say("\n".join(_rendered(lines, width, is_terminal=sys.stdout.isatty())))
    else:
        _show(source)


def _is_interactive() -> bool:
    is_dumb = os.environ.get("TERM", "dumb") in ("", "dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and not is_dumb


def _show(source: StateSource) -> None:
    terminal = Terminal()
    thread = StateThread(source, terminal)
    try:
        with terminal:
            _turn(terminal, thread, TopState(), blocks_for(sys.stdout.encoding))
    finally:
        thread.close()


def _turn(terminal: Terminal, thread: StateThread, state: TopState, blocks: str) -> None:
    """Draw new states and take keys, until a key quits or the terminal is gone."""
    while True:
        width, height = terminal.size
        if thread.error is not None:
            raise thread.error
        newest = thread.newest
        if newest is None:
            lines = [Text("reading the fleet"), *[Text()] * (height - 1)]
        else:
            lines = screen(*newest, state, width, height, blocks)
        terminal.draw(_rendered(lines, width, is_terminal=True))
        keys = terminal.read_keys(INTERVAL_S)
        if keys is None or any(_press(state, key, newest) for key in keys):
            return


def _press(state: TopState, key: str, newest: tuple[Document, Curves] | None) -> bool:
    return key == "q" if newest is None else press(state, key, newest[0])


def _rendered(lines: Sequence[Text], width: int, *, is_terminal: bool) -> list[str]:
    """Return the lines with this terminal's colours; without colours for a pipe or if NO_COLOR is set."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=is_terminal, legacy_windows=False, highlight=False)
    for line in lines:
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True, soft_wrap=False)
    return file.getvalue().split("\n")[:-1]

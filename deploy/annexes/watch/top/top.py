"""`headrace top`: a fleet in a terminal, read again each second; plain text once where there is no terminal."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from headrace.deploy.annexes.watch.state.fleet_state import Document, StateReader
from headrace.deploy.annexes.watch.state.series import CurvesReader
from headrace.deploy.annexes.watch.top.top_view import SHOWN_CURVES, Curves, plain, screen
from headrace.deploy.monitoring.facts import FactsReader
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.accounts.redis_keys import RINGS
from headrace.schemas.basics.stop_event import stop_event

INTERVAL_S = 1.0
PLAIN_WIDTH = 160


class StateSource:
    """Reads state and curves. One thread at a time."""

    def __init__(self, reader: FactsReader) -> None:
        self._reader = reader
        self._state = StateReader(reader)
        self._series = CurvesReader([RINGS[0][1]])
        self.curves: Curves = {}

    def read(self) -> Document:
        """Return the state as of now. Waits some seconds at most. Raises what `FactsReader.read` raises."""
        document = self._state.read()
        self._series.read(self._reader.view)
        for ring in self._series.readers.values():
            self.curves = ring.series(names=SHOWN_CURVES).curves
        return document


def top(reader: FactsReader, *, once: bool, as_json: bool) -> None:
    """Show the fleet until Ctrl-C. Show it once if `once` is set, or if stdout is no terminal.

    Raises `RedisContractError`, and `RunDirError` once the run directory was removed.
    """
    source = StateSource(reader)
    if as_json:
        say(orjson.dumps(source.read()).decode())
    elif once or not _is_interactive():
        width = Console().width if sys.stdout.isatty() else PLAIN_WIDTH
        shown = _rendered(plain(source.read(), source.curves, width), width, is_terminal=sys.stdout.isatty())
        say("\n".join(shown))
    else:
        _show(source)


def _is_interactive() -> bool:
    is_dumb = os.environ.get("TERM", "dumb") in ("", "dumb", "unknown")
    return sys.stdout.isatty() and not is_dumb


def _show(source: StateSource) -> None:
    """Draw the newest state each second, until Ctrl-C or SIGTERM."""
    with stop_event() as stopping, Live(Text("reading the fleet"), screen=True, auto_refresh=False) as live:
        while not stopping.is_set():
            document = source.read()
            width, height = live.console.size
            live.update(Group(*screen(document, source.curves, width, height)), refresh=True)
            stopping.wait(INTERVAL_S)


def _rendered(lines: Sequence[Text], width: int, *, is_terminal: bool) -> list[str]:
    """Return the lines with this terminal's colours; without colours for a pipe or if NO_COLOR is set."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=is_terminal, legacy_windows=False, highlight=False)
    for line in lines:
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True, soft_wrap=False)
    return file.getvalue().split("\n")[:-1]

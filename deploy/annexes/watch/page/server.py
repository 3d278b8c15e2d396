"""The process of the page: one thread reads Redis once a second for all viewers, another one serves them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from headrace.deploy.annexes.watch.page.app import RENDEZVOUS, make_app
from headrace.deploy.annexes.watch.page.hub import INTERVALS, Hub
from headrace.deploy.annexes.watch.state.fleet_state import StateReader
from headrace.deploy.annexes.watch.state.series import CurvesReader
from headrace.deploy.annexes.watch.web.web_port import WebPort
from headrace.deploy.monitoring.facts import FactsReader
from headrace.schemas.basics.stop_event import stop_event

READ_S = 1.0
"""Seconds between two reads."""
_SHARE = 25
"""A pause is at least so many times as long as the CPU time of the read before it, so that a large fleet's page is
slower and not more costly.
"""


def serve_page(reader: FactsReader, listen: str, token_file: Path | None, announce: Callable[[str], None]) -> None:
    """Serve the page until a stop signal. Then show the newest state once more to all viewers.

    `announce` gets the page's address once it can be opened. Raises what `WebPort` raises.
    """
    hub = Hub()
    with (
        stop_event() as stopping,
        WebPort(listen, token_file) as port,
        port.serving(make_app(hub), public=(RENDEZVOUS,)),
    ):
        announce(f"{port.url}/")
        try:
            _read_until(stopping, hub, reader)
        finally:
            hub.end()


def _read_until(stopping: threading.Event, hub: Hub, reader: FactsReader) -> None:
    states, curves = StateReader(reader), CurvesReader(INTERVALS)
    while True:
        began, is_last = time.thread_time(), stopping.is_set()
        state = states.read()
        with hub.series_lock:
            curves.read(reader.view, at_once=is_last)
        hub.readers = curves.readers
        hub.publish(state, states.facts)
        if is_last:
            return
        stopping.wait(max(READ_S, _SHARE * (time.thread_time() - began)))

"""The process of the page: one thread reads Redis once a second for all viewers, another one serves them.

It serves its files, the newest state, a stream of states, curves, and the fleet's rendezvous.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.deploy.annexes.watch.exporter.metrics_text import metrics_text
from headrace.deploy.annexes.watch.state.fleet_state import StateReader
from headrace.deploy.annexes.watch.state.series import CurvesReader, Series, SeriesReader
from headrace.deploy.annexes.watch.state.shown_figures import PAGE_CHARTS, PAGE_CURVES
from headrace.deploy.annexes.watch.web.web_port import WebPort
from headrace.deploy.monitoring.facts import Facts, FactsReader
from headrace.schemas.accounts.redis_keys import RINGS
from headrace.schemas.basics.run_files import RENDEZVOUS_FILE, rendezvous_path
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.peers.rendezvous import Published
from headrace.schemas.settings.config import FleetConfig


class Hub:
    """Passes states from the thread that reads Redis to the event loop that serves viewers.

    The reading thread calls `publish` and `end`. The event loop calls the rest.
    """

    def __init__(self) -> None:
        self.number = 0
        """Number of the newest state; 0 before the first."""
        self.newest = b"{}"
        self.newest_event = b""
        """The newest state as a server-sent event. All viewers share it: copies for slow ones would fill memory."""
        self.facts: Facts | None = None
        """The facts of the newest state."""
        self.has_ended = False
        self.series_lock = threading.Lock()
        self.readers: Mapping[int, SeriesReader] = {}
        """The readers of curves, by interval of the ring in s."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None

    # The reading thread.

    def publish(self, state: object, facts: Facts | None = None) -> None:
        """Replace the newest state and wake all viewers that wait for it."""
        self.facts = facts
        self._tell(orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS))

    def end(self) -> None:
        """Let every viewer's stream end once it has sent the newest state."""
        self.has_ended = True
        self._tell(self.newest)

    def _tell(self, text: bytes) -> None:
        self.newest, self.newest_event, self.number = text, b"data: " + text + b"\n\n", self.number + 1
        if self._loop is not None and self._news is not None:
            self._loop.call_soon_threadsafe(self._news.set)

    # The event loop.

    async def newer_than(self, number: int, timeout_s: float) -> int:
        """Wait for a state newer than `number`. Return the newest state's number, which is `number` after a timeout."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._news is None:
            self._loop, self._news = loop, asyncio.Event()
        deadline = loop.time() + timeout_s
        while self.number <= number and (left := deadline - loop.time()) > 0:
            self._news.clear()
            if self.number <= number:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
        return self.number

    def series(self, interval_s: int, after_unix_s: float, names: Iterable[str] | None) -> Series:
        """Return curves after a time. Takes some ms, and the reading thread may wait for it."""
        with self.series_lock:
            reader = self.readers.get(interval_s)
            return reader.series(after_unix_s, names) if reader is not None else Series(interval_s, [], {})


INTERVALS = tuple(seconds for _, seconds, _ in RINGS)


ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("uPlot.iife.min.js", "elements.js", "charts.js", "app.js")
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_ALIVE_S = 15.0
"""Seconds without a state after which a stream says that it is alive."""
_FIRST_S = 3.0
"""Seconds for which an answer waits for the first state."""
RENDEZVOUS = f"/{RENDEZVOUS_FILE}"
READ_S = 1.0
_SHARE = 25
"""A pause is at least so many times as long as the CPU time of the read before it, so that a large fleet's page is
slower and not more costly.
"""


def make_app(hub: Hub) -> Starlette:
    """Return the application that shows what `hub` has. Reads the page's files now."""
    files = {path.name: path.read_bytes() for path in ASSETS.iterdir() if path.suffix in (".html", *_TYPES)}
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:16]}"' for name, content in files.items()}

    async def page(_: Request) -> Response:
        return Response(files["index.html"], media_type="text/html")

    async def worker(request: Request) -> Response:
        slot = request.path_params["slot"]  # of any length: int() refuses 5,000 digits
        return await page(request) if slot.isascii() and slot.isdigit() else PlainTextResponse("no such slot\n", 404)

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        kind = _TYPES.get(Path(name).suffix)
        if kind is None or name not in files:
            return PlainTextResponse("there is no such file\n", 404)
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers={"etag": tags[name]})
        return Response(files[name], media_type=kind, headers={"etag": tags[name]})

    async def state(_: Request) -> Response:
        await hub.newer_than(0, _FIRST_S)
        return Response(hub.newest, media_type="application/json")

    async def series(request: Request) -> Response:
        interval_s, after = _number(request, "interval_s", INTERVALS[0]), _number(request, "after", 0.0)
        if interval_s not in INTERVALS:
            return PlainTextResponse(f"interval_s is one of {', '.join(map(str, INTERVALS))}\n", 400)
        names = None if request.query_params.get("all") else PAGE_CURVES

        def document() -> bytes:
            return orjson.dumps({**hub.series(int(interval_s), after, names).document(), "charts": PAGE_CHARTS})

        return Response(await run_in_threadpool(document), media_type="application/json")

    async def metrics(request: Request) -> Response:
        await hub.newer_than(0, _FIRST_S)
        facts = hub.facts
        found = {} if facts is None else {facts.snapshot.fleet_id: facts}
        text, kind = await run_in_threadpool(metrics_text, found, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    async def rendezvous(_: Request) -> Response:
        if hub.facts is None:
            await hub.newer_than(0, _FIRST_S)
        try:
            known = (hub.facts.run_dir, hub.facts.config) if hub.facts is not None else (None, None)
            text = await run_in_threadpool(published, *known)
        except (OSError, ValueError) as error:
            return PlainTextResponse(f"no rendezvous can be read here: {str(error)[:200]}\n", 404)
        return Response(text, media_type="application/json")

    async def events(_: Request) -> Response:
        return StreamingResponse(states_of(hub), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    return Starlette(
        routes=[
            Route("/", page),
            Route("/worker/{slot}", worker),
            Route("/state.json", state),
            Route("/series.json", series),
            Route("/events", events),
            Route("/metrics", metrics),
            Route(RENDEZVOUS, rendezvous),
            Route("/assets/{name}", asset),
        ]
    )


def published(run_dir: Path | None, config: FleetConfig | None) -> bytes:
    """Return what the broker of this run publishes. Raises `OSError` and `ValueError`.

    Only the fields of a rendezvous leave this process, even if the file has more.
    """
    if run_dir is None:
        raise ValueError("the fleet's run directory is not on this machine")
    named = config.fleet.rendezvous if config is not None else ""
    return Published.parse(rendezvous_path(named, run_dir).read_bytes()).dump()


async def states_of(hub: Hub) -> AsyncIterator[bytes]:
    """Yield each newest state as a server-sent event. A viewer that reads slowly misses the states between.

    A hub that has ended ends the stream after its last state.
    """
    shown = 0
    while not (hub.has_ended and shown == hub.number):
        number = await hub.newer_than(shown, _ALIVE_S)
        yield b": alive\n\n" if number == shown else hub.newest_event
        shown = number
    yield b"event: end\ndata:\n\n"


def _number(request: Request, name: str, default: float) -> float:
    try:
        value = float(request.query_params.get(name, default))
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


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

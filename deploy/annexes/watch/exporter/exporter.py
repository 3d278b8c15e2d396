"""`headrace exporter`: metrics of one or several fleets at an HTTP port, read from Redis at each scrape."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headrace.deploy.annexes.watch.exporter.metrics_text import metrics_text
from headrace.deploy.annexes.watch.web.web_port import WebPort
from headrace.deploy.monitoring.facts import Facts, FactsReader
from headrace.deploy.run.fleet_file import read_fleet_file
from headrace.deploy.run.options import chosen_run, named_redis
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.schemas.basics.counted_warnings import CountedWarnings
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.errors import ConfigError, HeadraceError

log = logging.getLogger("headrace.exporter")


class FleetReaders:
    """Reads several fleets at once, each in a thread of its own. One whose Redis hangs takes a few seconds."""

    def __init__(self, readers: Mapping[str, FactsReader]) -> None:
        self._readers = readers
        self._threads = ThreadPoolExecutor(len(readers), thread_name_prefix="redis-read")
        self._warnings = CountedWarnings(log)

    def read(self) -> dict[str, Facts | None]:
        """Return the facts of each fleet; None for one that cannot be read. One thread at a time."""
        reading = {fleet_id: self._threads.submit(reader.read) for fleet_id, reader in self._readers.items()}
        return {fleet_id: self._result_of(fleet_id, future) for fleet_id, future in reading.items()}

    def _result_of(self, fleet_id: str, reading: Future[Facts]) -> Facts | None:
        facts: Facts | None = None
        try:
            facts = reading.result()
            problem = facts.redis_error
        except HeadraceError as error:
            problem = str(error)
        if problem:
            self._warnings.warn(fleet_id.encode(), "read", f"fleet {fleet_id}: {problem}")
        return facts

    def close(self) -> None:
        """Close the connections. Waits some seconds at most for reads under way."""
        self._threads.shutdown(cancel_futures=True)
        for reader in self._readers.values():
            reader.close()


def metrics_app(readers: FleetReaders) -> Starlette:
    """Return the application that serves `/metrics`. Scrapes that come together share one read of Redis."""
    reading: asyncio.Task[dict[str, Facts | None]] | None = None

    async def metrics(request: Request) -> Response:
        nonlocal reading
        if reading is None or reading.done():
            reading = asyncio.create_task(asyncio.to_thread(readers.read))
        text, content_type = metrics_text(await asyncio.shield(reading), request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def root(_: Request) -> Response:
        return PlainTextResponse("headrace exporter: the metrics are at /metrics\n")

    return Starlette(routes=[Route("/metrics", metrics), Route("/", root)])


def export_metrics(by_fleet: Mapping[str, FactsReader], listen: str, token_file: Path | None) -> None:
    """Serve `/metrics` until SIGTERM or Ctrl-C. Raises `ConfigError` or `PortInUseError` where it cannot listen."""
    set_up_logging(Identity("", "exporter"))
    with ExitStack() as stack:
        stopping = stack.enter_context(stop_event())
        readers = FleetReaders(by_fleet)
        stack.callback(readers.close)
        port = stack.enter_context(WebPort(listen, token_file))
        log.info("headrace %s exports fleet %s at %s/metrics", version("headrace"), ", ".join(by_fleet), port.url)
        port.serve(metrics_app(readers), stopping)


def chosen_readers(
    run_dirs: Sequence[Path] = (), redis_url: str = "", fleet_ids: Sequence[str] = ()
) -> dict[str, FactsReader]:
    """Return a reader for each fleet that was chosen, by its name.

    Raises `ConfigError` for a wrong choice, and `RunDirError` for a directory without a fleet.
    """
    if not (redis_url or fleet_ids):
        run_dirs = run_dirs or [chosen_run("")]
        return _once_each((read_fleet_file(path / "fleet.json").fleet_id, FactsReader(path)) for path in run_dirs)
    if run_dirs or not (redis_url and fleet_ids):
        raise ConfigError("name fleets by --run-dir, or by --redis-url and --fleet-id together")
    url = named_redis(redis_url)
    return _once_each((fleet_id, FactsReader(redis_url=url, fleet_id=fleet_id)) for fleet_id in fleet_ids)


def _once_each(named: Iterable[tuple[str, FactsReader]]) -> dict[str, FactsReader]:
    found: dict[str, FactsReader] = {}
    for fleet_id, reader in named:
        if fleet_id in found:
            raise ConfigError(f"fleet {fleet_id} is named twice; its metrics would clash")
        found[fleet_id] = reader
    return found

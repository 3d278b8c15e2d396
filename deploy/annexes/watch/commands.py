"""The commands that show a fleet to people and programs: `ps`, `top`, `dashboard`, `report`, `exporter`."""

from __future__ import annotations

import logging
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import orjson
import typer

from headrace.deploy.command.monitoring_commands import FleetElsewhere, RedisElsewhere, chosen_fleet
from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import Asked, named_fleet, resolve_each
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.errors import ConfigError

log = logging.getLogger("headrace.dashboard")

app = typer.Typer()

Listen = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Address to serve; port 0 takes a free one.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help="File of the token that readers show; needed elsewhere than on loopback."),
]


@command(app, "headrace ps", "headrace ps runs/a --json | python -m json.tool", options="run run_dir config as_json")
def ps(asked: Asked, as_json: bool) -> None:
    """Show the fleet's processes, whether they live, and workers that came from elsewhere."""
    from headrace.deploy.annexes.watch.state.ps import all_processes, reported, table
    from headrace.deploy.process.proc_stat import is_alive
    from headrace.deploy.run.fleet_file import read_fleet_file
    from headrace.schemas.accounts.redis_keys import revoked_sessions

    run_dir = asked.run_dir()
    fleet = read_fleet_file(run_dir / "fleet.json")
    seen, missing = reported(fleet, run_dir)
    rows, revoked = all_processes(fleet, seen, time.time()), revoked_sessions(seen.gauges)
    if not as_json:
        say(table(fleet, rows, missing, revoked))
        return
    supervisor = {"pid": fleet.supervisor_pid, "alive": is_alive(fleet.supervisor_pid)}
    facts = {"fleet_id": fleet.fleet_id, "state": fleet.state, "endpoints": fleet.endpoints, "supervisor": supervisor}
    say(orjson.dumps({**facts, "processes": rows, "sessions_revoked": revoked}).decode())


@command(
    app,
    "headrace top",
    "headrace top runs/a",
    "headrace top --redis-url redis://localhost:6379/0 --fleet-id demo",
    "headrace top --once | less",
    "headrace top --json | python -m json.tool",
    options="run run_dir redis_url fleet_id config once as_json",
)
def top(
    asked: Asked,
    *,
    redis_url: RedisElsewhere = "",
    fleet_id: FleetElsewhere = "",
    once: Annotated[bool, typer.Option("--once", help="Print once and end, as without a terminal.")] = False,
    as_json: bool,
) -> None:
    """Show a fleet live in this terminal: verdict, findings, numbers, ledger, workers.

    It only reads: Redis, and the run directory where it is on this machine. Ctrl-C ends it; the fleet goes on. To sort,
    filter and look into a worker, use the page: headrace dashboard.
    """
    from headrace.deploy.annexes.watch.top.top import top as show

    with chosen_fleet(asked, redis_url, fleet_id) as reader:
        show(reader, once=once, as_json=as_json)


@command(
    app,
    "headrace dashboard",
    "headrace dashboard runs/a --listen 127.0.0.1:8090",
    "headrace dashboard --redis-url redis://localhost:6379/0 --fleet-id demo",
    "headrace dashboard --listen 0.0.0.0:8090 --token-file keys/http.token",
    options="run run_dir redis_url fleet_id config listen token_file",
)
def dashboard(
    asked: Asked,
    redis_url: RedisElsewhere = "",
    fleet_id: FleetElsewhere = "",
    listen: Listen = "127.0.0.1:0",
    token_file: TokenFile = None,
) -> None:
    """Show a fleet as a live page for browsers.

    It only reads: Redis, and the run directory where it is on this machine. Ctrl-C ends it; the fleet goes on.
    """
    from headrace.deploy.annexes.watch.page.app import serve_page
    from headrace.deploy.terminal.logs import Identity, set_up_logging

    set_up_logging(Identity(fleet_id, "dashboard"))
    with chosen_fleet(asked, redis_url, fleet_id) as reader:
        serve_page(reader, listen, token_file, lambda address: log.info("dashboard: %s", address))


@command(
    app,
    "headrace report",
    "headrace report runs/a",
    "headrace report runs/a --out report.html --csv curves.csv --json report.json",
    "headrace report runs/a --json - | python -m json.tool",
)
def report(
    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="A run directory; default: the newest one.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: report.html in RUN.")] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="The rows as a table too; - for stdout.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="All facts and curves as JSON too; - for stdout.")
    ] = None,
) -> None:
    """Write a report of a run, during or after it.

    It is one HTML file that needs nothing else: verdict, curves, ledger, restarts, evaluations, settings, versions.
    """
    from headrace.deploy.annexes.watch.report.report_command import write_report

    write_report(Asked(flags={"fleet.run_dir": run and str(run)}).run_dir(), out, csv, json)


DEFAULT_LISTEN = "127.0.0.1:9747"
"""Address of `headrace exporter`; the scrape config names it too."""
_PLACES = {
    "scrape-config": "prometheus/prometheus.yml",
    "alert-rules": "prometheus/headrace-rules.yml",
    "grafana-dashboard": "grafana/headrace.json",
}


class MonitoringFile(StrEnum):
    """A file for Prometheus or Grafana that comes with the package."""

    SCRAPE_CONFIG = "scrape-config"
    ALERT_RULES = "alert-rules"
    GRAFANA_DASHBOARD = "grafana-dashboard"

    def text(self) -> str:
        """Return the text of the file."""
        return (Path(__file__).parents[2] / _PLACES[self]).read_text(encoding="utf-8")


@command(
    app,
    "headrace exporter",
    "headrace exporter --run-dir runs/a --run-dir runs/b --listen 127.0.0.1:9747",
    "headrace exporter --redis-url redis://127.0.0.1:6379 --fleet-id demo",
    "headrace exporter --listen 0.0.0.0:9747 --token-file keys/http.token --run-dir runs/a",
    "headrace exporter --print alert-rules > headrace-rules.yml",
)
def exporter(
    *,
    listen: Listen = DEFAULT_LISTEN,
    run_dir: Annotated[
        list[Path] | None,
        typer.Option("--run-dir", help="Folder of a run; default: the newest one in runs/. May be repeated."),
    ] = None,
    redis_url: RedisElsewhere = "",
    fleet_id: Annotated[
        list[str] | None, typer.Option("--fleet-id", help="Name of a fleet in that Redis. May be repeated.")
    ] = None,
    config: Path | None,
    token_file: TokenFile = None,
    print_: Annotated[
        MonitoringFile | None,
        typer.Option("--print", help="Show a file for Prometheus or Grafana, and do nothing else."),
    ] = None,
) -> None:
    """Serve metrics of fleets to Prometheus, at /metrics.

    Each scrape reads Redis. A fleet whose Redis does not answer has headrace_up 0. --config gives the fleet and the
    Redis that it names.
    """
    if print_ is not None:
        say(print_.text().rstrip())
        return
    from headrace.deploy.annexes.watch.exporter.exporter import chosen_readers, export_metrics

    if config is not None:
        if run_dir or redis_url or fleet_id:
            raise ConfigError("name fleets by --config, or by the other options, not by both", key="--config")
        fleets = _fleets_named_in(config)
        redis_url, fleet_id = fleets[0][0], [named for _, named in fleets]
    export_metrics(chosen_readers(run_dir or (), redis_url, fleet_id or ()), listen, token_file)


def _fleets_named_in(config: Path) -> list[tuple[str, str]]:
    fleets = [named for resolved in resolve_each(Asked(config)) if (named := named_fleet(resolved)) is not None]
    if not fleets:
        raise ConfigError(f"{config} names no fleet to export: it needs redis.url and fleet.fleet_id", key="--config")
    return fleets

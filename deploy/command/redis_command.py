"""`headrace redis`: the command line for what fleets have in Redis; `redis_inventory.py` does the work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import named_redis
from headrace.schemas.basics.printable import printable
from headrace.schemas.errors import ConfigError

if TYPE_CHECKING:
    from headrace.deploy.run.redis_inventory import FleetEntry, Inventory, KeyEntry

FILE_WIDTH = 160

Server = Annotated[
    str, typer.Option("--redis-url", help="redis://..., rediss://..., or a file that has it; or name --run-dir.")
]
Run = Annotated[Path | None, typer.Option("--run-dir", help="A run, for the Redis of its fleet.")]
Fleet = Annotated[str, typer.Argument(metavar="FLEET", help="The fleet's name.")]

app = typer.Typer(help="Keys of fleets in Redis.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _redis() -> None:
    """Show and remove what fleets have in a Redis."""


@command(
    app,
    "headrace redis keys --redis-url redis://localhost:6379/0",
    "headrace redis keys demo --redis-url redis://localhost:6379/0",
    "headrace redis keys --run-dir runs/a --json",
)
def keys(
    *,
    fleet: Annotated[str, typer.Argument(metavar="FLEET", help="A fleet's name; without it: all fleets.")] = "",
    redis_url: Server = "",
    run_dir: Run = None,
    as_json: bool,
) -> None:
    """List the fleets in a Redis, or the keys of one with their size and when they expire."""
    with _inventory(redis_url, run_dir) as (inventory, own):
        if chosen := fleet or own:
            _show_keys(chosen, inventory.keys(chosen), as_json=as_json)
        else:
            _show_fleets(inventory.fleets(), as_json=as_json)


@command(app, "headrace redis forget demo --redis-url redis://localhost:6379/0")
def forget(
    fleet: Fleet,
    redis_url: Server = "",
    run_dir: Run = None,
    force: Annotated[bool, typer.Option("--force", help="Also while a broker of the fleet reports.")] = False,
) -> None:
    """Remove all keys of a fleet from a Redis: its books, weights and checkpoint there.

    What its run directory has stays. A fleet that goes on in that directory reports its books again.
    """
    with _inventory(redis_url, run_dir) as (inventory, _):
        if not force and inventory.reports(fleet):
            raise ConfigError(
                f"a broker of fleet {fleet!r} has reported in the last seconds; stop the fleet, or say --force"
            )
        count = inventory.forget(fleet)
    typer.echo(f"removed {count} keys of fleet {printable(fleet)}")


def _show_fleets(fleets: list[FleetEntry], *, as_json: bool) -> None:
    if as_json:
        typer.echo(orjson.dumps([asdict(entry) for entry in fleets]).decode())
        return
    table = Table("fleet", "contract", "last report", title=f"{len(fleets)} fleets", title_justify="left")
    for entry in fleets:
        age = "never" if entry.reported_age_s is None else f"{entry.reported_age_s:,.0f} s ago"
        table.add_row(printable(entry.fleet_id), printable(entry.contract) or "-", age)
    _print(table)


def _show_keys(fleet: str, entries: list[KeyEntry], *, as_json: bool) -> None:
    if as_json:
        rows = [asdict(entry) | {"meaning": entry.key.meaning if entry.key else ""} for entry in entries]
        typer.echo(orjson.dumps(rows).decode())
        return
    total = sum(entry.nbytes for entry in entries)
    title = f"fleet {printable(fleet)}: {len(entries)} keys, {total:,} bytes"
    table = Table("key", "type", "length", "bytes", "expires", "written by", title=title, title_justify="left")
    table.caption, table.caption_justify = 'the page "Redis keys" of the reference says what each holds', "left"
    for entry in entries:
        expires = "-" if entry.expires_s is None else f"in {entry.expires_s:.0f} s"
        writer = entry.key.writer if entry.key else "not of this contract"
        table.add_row(printable(entry.name), entry.type, f"{entry.length:,}", f"{entry.nbytes:,}", expires, writer)
    _print(table)


@contextlib.contextmanager
def _inventory(redis_url: str, run_dir: Path | None) -> Iterator[tuple[Inventory, str]]:
    """Yield the keys of the Redis that was named, and the fleet of the run that was; "" without a run."""
    from headrace.deploy.report.audit import find_books
    from headrace.deploy.run.redis_inventory import Inventory
    from headrace.deploy.run.redis_server import serving

    if bool(redis_url) == (run_dir is not None):
        raise ConfigError("name one of --redis-url and --run-dir")
    if run_dir is None:
        with Inventory(named_redis(redis_url)) as inventory:
            yield inventory, ""
        return
    url, fleet_id = find_books(run_dir)
    with serving(run_dir, url), Inventory(url) as inventory:
        yield inventory, fleet_id


def _print(table: Table) -> None:
    console = Console()
    Console(width=None if console.is_terminal else FILE_WIDTH, markup=False).print(table)

"""`headrace keys`: the command line for keys; `key_pairs.py` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.table import Table

from headrace.deploy.command.option_table import command
from headrace.deploy.terminal.console import PrintableConsole
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.errors import KeysError

_ROLES = "worker, supervisor, learner, env-host or client"

Folder = Annotated[Path, typer.Option("--dir", help="Folder of the key files.")]
Role = Annotated[str, typer.Argument(metavar="ROLE", help=f"Role of the key: {_ROLES}.")]
Group = Annotated[str, typer.Option("--group", metavar="NAME", help="Group of the key; without it, the default one.")]

app = typer.Typer(
    help="Keys of the fleet's sockets, and its users in Redis.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _keys() -> None:
    """Manage keys of the fleet's sockets (which peer may be a worker, a learner, the broker) and users in Redis."""


@command(
    app,
    "headrace keys init",
    "headrace keys init --dir /etc/headrace/keys",
    "headrace up --set keys.dir=keys",
    "headrace broker --run-dir runs/b --fleet-id demo --set broker.host=0.0.0.0 --set keys.dir=keys",
)
def init(
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the key files; made if need be.")] = Path("keys"),
    force: Annotated[bool, typer.Option("--force", help="Replace the keys that are there.")] = False,
) -> None:
    """Make a key pair for each role, and http.token.

    Tells what to copy to which machine. A peer with a .secret file has its role.
    """
    from headrace.deploy.run.key_pairs import make_keys, what_to_copy

    make_keys(folder, force=force)
    say(what_to_copy(folder.absolute()))


@command(
    app,
    "headrace keys add worker --group gpu",
    "headrace keys add supervisor --group gpu --dir /etc/headrace/keys",
    "headrace worker --endpoint tcp://BROKER:5701 --fleet-id demo --set keys.dir=keys",
)
def add(role: Role, group: Group = "", folder: Folder = Path("keys")) -> None:
    """Make a key pair for one more group of peers, or one in place of a revoked pair.

    A group's key can be revoked alone. A broker that runs with this folder admits the key within seconds.
    """
    from headrace.deploy.run.key_pairs import add_key, where_to_copy

    say(where_to_copy(folder.absolute(), add_key(folder, role, group)))


@command(app, "headrace keys list", "headrace keys list --dir /etc/headrace/keys --json", name="list")
def list_keys(*, folder: Folder = Path("keys"), as_json: bool) -> None:
    """Show role, group, fingerprint and state of each key in a folder.

    Exit with an error that names the files that are damaged, or that others may read.
    """
    from headrace.deploy.run.key_pairs import listed_keys, wrong_files

    rows, wrong = listed_keys(folder), wrong_files(folder)
    if as_json:
        problems = [str(error) for error in wrong]
        say(orjson.dumps({"dir": str(folder.absolute()), "keys": rows, "problems": problems}).decode())
    else:
        PrintableConsole().print(_table(rows))
    if wrong:
        others = f"; nor can {', '.join(Path(error.path).name for error in wrong[1:9])}" if len(wrong) > 1 else ""
        raise KeysError(wrong[0].path, f"{wrong[0].reason}{others}")


def _table(rows: list[dict[str, str]]) -> Table:
    table = Table("role", "group", "fingerprint", "key in logs", "state")
    for row in rows:
        shown = f"{row['public'][:8]}..." if row["public"] else "-"
        table.add_row(row["role"], row["group"] or "-", row["fingerprint"] or "-", shown, row["state"])
    return table


@command(app, "headrace keys revoke worker --group gpu", "headrace keys revoke client --dir /etc/headrace/keys")
def revoke(role: Role, group: Group = "", folder: Folder = Path("keys")) -> None:
    """Revoke the key of a role and group for good.

    A broker that runs with this folder ends the sessions of its peers within seconds, and refuses them from then on.
    """
    from headrace.deploy.run.key_pairs import revoke_key

    key, path = revoke_key(folder, role, group)
    say(f"revoked in {folder.absolute()}: {key.name}, {key.fingerprint}")
    if role in ("env-host", "client"):
        say(f"Copy {path.name} to each worker's machine that serves such peers.")
    say(f"headrace keys add {role}{f' --group {group}' if group else ''} makes another.")


@command(
    app,
    "headrace keys redis --fleet-id demo",
    "headrace up --set fleet.fleet_id=demo --redis-url keys/redis-writer.url",
)
def redis(
    fleet_id: Annotated[str, typer.Option("--fleet-id", help="The fleet whose keys the users may use.")],
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the URL files; made if need be.")] = Path("keys"),
    force: Annotated[bool, typer.Option("--force", help="Replace the files that are there.")] = False,
) -> None:
    """Print commands that make users with least rights in a Redis that others use too: one writes, one reads.

    Each has a file with its URL in --dir, which --redis-url takes. Repeat it after a restart of a Redis that has
    forgotten its users: the passwords stay.
    """
    from headrace.deploy.run.redis_users import make_users, what_to_do

    say(what_to_do(folder, fleet_id, make_users(folder, fleet_id, force=force)))

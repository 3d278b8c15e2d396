"""`headrace keys`: the command line for keys; `key_pairs.py` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.deploy.options import examples
from headrace.deploy.output import with_output_options

app = typer.Typer(help="Keys of the fleet's sockets.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _keys() -> None:
    """Manage keys of the fleet's sockets: which peer may be a worker, a learner, the broker."""


@app.command(
    epilog=examples(
        "headrace keys init",
        "headrace keys init --dir /etc/headrace/keys",
        "headrace up --set keys.dir=keys",
        "headrace broker --run-dir runs/b --fleet-id demo --set broker.host=0.0.0.0 --set keys.dir=keys",
    )
)
@with_output_options
def init(
    folder: Annotated[Path, typer.Option("--dir", help="Folder for the key files; made if need be.")] = Path("keys"),
    force: Annotated[bool, typer.Option("--force", help="Replace the keys that are there.")] = False,
) -> None:
    """Make key pairs for broker, workers, learner and supervisor.

    Tells what to copy to which machine. A peer with a .secret file has its role.
    """
    from headrace.deploy.key_pairs import make_keys, what_to_copy

    make_keys(folder, force=force)
    typer.echo(what_to_copy(folder.absolute()))

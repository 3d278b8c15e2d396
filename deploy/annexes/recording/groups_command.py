"""`headrace groups`: the consumer groups of a fleet."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.table import Column, Table

from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import Asked, chosen_run, named_fleet, resolve_each
from headrace.deploy.run.several_brokers import whole_run_dir
from headrace.deploy.terminal.console import PrintableConsole
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.basics.bounds import TRAIN
from headrace.schemas.credentials.key_files import group_rule, is_group
from headrace.schemas.errors import ConfigError, RunDirError, refusal

if TYPE_CHECKING:
    from headrace.schemas.accounts.consumer_groups import GroupRow
    from headrace.schemas.credentials.keys import ClientKeys

_TIMEOUT_S = 10.0
_COUNTS = ("behind", "oldest, s", "committed", "lost")

app = typer.Typer(help="Consumer groups of a fleet.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _groups() -> None:
    """Manage the groups that read a fleet's batches beside its learner."""


@command(
    app,
    "headrace groups list",
    "headrace groups list --run-dir runs/a --json",
    options="run_dir config as_json",
    name="list",
)
def list_groups(asked: Asked, *, as_json: bool) -> None:
    """Show each consumer group but the learner's: its reader, how far it is behind, and what it has lost."""
    from headrace.deploy.report.audit import find_books
    from headrace.deploy.run.redis_server import serving
    from headrace.deploy.run.redis_view import FleetView
    from headrace.schemas.accounts.redis_keys import FLEET, GAUGES, OF_GROUPS

    for config in resolve_each(asked):
        named = named_fleet(config)
        run_dir = whole_run_dir(config) if named is not None else chosen_run(config.fleet.run_dir)
        url, fleet_id = find_books(run_dir, named)
        with serving(run_dir, url), FleetView(url, fleet_id, run_dir) as view:
            groups = {name: books.state for name, books in view.read((FLEET, GAUGES, *OF_GROUPS)).groups.items()}
        if as_json:
            shown = {name: {**state.model_dump(), "lost": state.lost_steps} for name, state in groups.items()}
            say(orjson.dumps({"fleet_id": fleet_id, "groups": shown}).decode())
        else:
            PrintableConsole().print(_table(groups, f"consumer groups of fleet {fleet_id}, in agent steps"))


def _table(groups: Mapping[str, GroupRow], title: str) -> Table:
    columns: list[str | Column] = ["group", "on slow", "reader", *(Column(name, justify="right") for name in _COUNTS)]
    table = Table(*columns, title=title, title_justify="left")
    for name, state in groups.items():
        reader = f"pid {state.pid} on {state.host}" if state.connected else "away"
        counts = (state.lag_steps, state.oldest_s, state.committed[0], state.lost_steps)
        table.add_row(name, state.on_slow, reader, *(f"{count:,.0f}" for count in counts))
    return table


@command(
    app,
    "headrace groups remove record",
    "headrace groups remove record --run-dir runs/a",
    "headrace groups remove record --endpoint tcp://BROKER:5700 --set keys.dir=keys",
    options="name endpoint run_dir config sets",
)
def remove(
    asked: Asked,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The group's name.")],
    *,
    endpoint: str | None,
) -> None:
    """Remove a consumer group and its books, and end its reader.

    A group that broker.consumer_groups names stays: take it out of the config, and start the broker again. Of several
    brokers, each is asked by its own --endpoint.
    """
    from headrace.deploy.run.fleet_file import read_addresses
    from headrace.deploy.run.joining import check_address, in_run
    from headrace.schemas.credentials.keys import client_keys

    if not name or not is_group(name) or name == TRAIN:
        rule = "the learner's group stays" if name == TRAIN else group_rule()
        raise ConfigError(f"{name!r:.80} cannot be removed; {rule}", key="NAME")
    if endpoint is not None:
        config = asked.settings
        check_address(endpoint, "--endpoint")
    else:
        run_dir = asked.run_dir()
        config, _ = in_run(asked, run_dir)
        endpoint = read_addresses(run_dir)[1].get("learner")
        if endpoint is None:
            raise RunDirError(str(run_dir), "no broker has served from it yet", "start `headrace up`")
    _remove(endpoint, name, client_keys(config.keys.dir or None, "learner"))
    say(f"removed consumer group {name}")


def _remove(endpoint: str, name: str, keys: ClientKeys | None) -> None:
    """Ask the broker to remove a group, and wait for its answer. Raises its refusal, and `UnreachableError`."""
    from headrace.learner_stub.link.broker_link import BrokerLink, await_message
    from headrace.schemas.messages import GroupHello, Reject, messages_to
    from headrace.schemas.peers.fleet_place import FleetPlace

    hello = GroupHello(token=os.urandom(8).hex(), channel="remove", group=name)
    link = BrokerLink(FleetPlace(endpoint, "learner", says_waiting=False), keys, hello.token, 0)
    deadline, is_sent = time.monotonic() + _TIMEOUT_S, False
    try:
        while time.monotonic() < deadline:
            is_sent = is_sent or link.send(hello.frames())
            await_message([link], 0.05)
            for answer in link.messages(messages_to("stream")):
                if isinstance(answer, Reject):
                    raise refusal(answer.code, answer.detail)
                return
        raise link.why_silent(_TIMEOUT_S)
    finally:
        link.close()

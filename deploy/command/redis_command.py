"""`headrace redis forget`: removes what a fleet left in a Redis that others share."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import named_redis
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.errors import ConfigError, RedisUnavailableError
from headrace.schemas.settings.redis_url import without_password

_MANY = 1000
"""Keys that one step of the search looks at, and that one call removes."""
_TIMEOUT_S = 5.0

app = typer.Typer(help="Keys of fleets in Redis.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _redis() -> None:
    """Remove what fleets have in a Redis."""


@command(app, "headrace redis forget demo --redis-url redis://localhost:6379/0")
def forget(
    fleet: Annotated[str, typer.Argument(metavar="FLEET", help="The fleet's name.")],
    redis_url: Annotated[str, typer.Option("--redis-url", help="redis://..., rediss://..., or a file that has it.")],
    force: Annotated[bool, typer.Option("--force", help="Also while a broker of the fleet reports.")] = False,
) -> None:
    """Remove all keys of a fleet from a Redis: its books, weights and checkpoint there.

    What its run directory has stays. A fleet that goes on in that directory reports its books again.
    """
    from redis.exceptions import NoPermissionError

    from headrace.broker.redis.client import REDIS_FAILURES, RedisReader, connect, unusable
    from headrace.schemas.accounts.redis_keys import FLEET, GAUGES, key_name

    url, pattern = named_redis(redis_url), re.sub(r"([*?\[\]\\])", r"\\\1", f"headrace:{{{fleet}}}:") + "*"
    with connect(url, _TIMEOUT_S) as client:
        try:
            ended = RedisReader(client).field(key_name(fleet, FLEET), "ended_unix_s")
            if not force and ended is None and client.exists(key_name(fleet, GAUGES)):
                raise ConfigError(f"a broker of fleet {fleet!r} still reports; stop the fleet, or say --force")
            names = list(set(client.scan_iter(match=pattern, count=_MANY)))
            for start in range(0, len(names), _MANY):
                client.unlink(*names[start : start + _MANY])
        except NoPermissionError as error:
            advice = "name a user who may list and remove keys; the users of `headrace keys redis` may not"
            raise RedisUnavailableError(without_password(url), str(error), _TIMEOUT_S, advice) from error
        except REDIS_FAILURES as error:
            raise unusable(url, error, _TIMEOUT_S) from error
    say(f"removed {len(names)} keys of fleet {fleet}")

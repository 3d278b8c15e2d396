"""The commands that say how a fleet is: `why` and `health`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.run.health import WITHIN_S
from headrace.deploy.run.options import Asked, chosen_run, named_fleet, named_redis, resolve_each
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from headrace.deploy.monitoring.facts import FactsReader
    from headrace.schemas.settings.config import FleetConfig

app = typer.Typer()

RedisElsewhere = Annotated[
    str, typer.Option("--redis-url", help="In place of --run-dir, with --fleet-id: redis://... or a file that has it.")
]
FleetElsewhere = Annotated[str, typer.Option("--fleet-id", help="Name of the fleet in that Redis.")]


@command(
    app,
    "headrace why",
    "headrace why runs/a --json | python -m json.tool",
    "headrace why --redis-url redis://localhost:6379/0 --fleet-id demo",
    options="run run_dir redis_url fleet_id config as_json",
)
def why(asked: Asked, *, redis_url: RedisElsewhere = "", fleet_id: FleetElsewhere = "", as_json: bool) -> None:
    """Say what is wrong with a fleet: who waits for whom, since when, by which limit, and what helps.

    Exit code 21 when something is wrong.
    """
    from headrace.deploy.monitoring.why import why as explain

    with chosen_fleet(asked, redis_url, fleet_id) as reader:
        findings = explain(reader, as_json=as_json)
    raise typer.Exit(ExitCode.FINDINGS if findings else ExitCode.OK)


@command(
    app,
    "headrace health --run-dir runs/a",
    "headrace health --role worker --ready",
    "headrace health --role learner --ready --within-s 600",
    options="role run_dir ready within_s",
)
def health(
    asked: Asked,
    *,
    role: Annotated[str, typer.Option("--role", help="worker, broker, learner or env-host; default: all here.")] = "",
    ready: Annotated[bool, typer.Option("--ready", help="They must make progress too, not only live.")] = False,
    within_s: Annotated[
        float, typer.Option("--within-s", min=0.0, help="Seconds without progress that still count as ready.")
    ] = WITHIN_S,
) -> None:
    """Say whether processes of a run on this host live, for liveness and readiness probes.

    A process that is stopped, hung or killed does not live. One that waits for another lives, and is not --ready. Exit
    code 21 when something is wrong. It reads files of the run directory only.
    """
    from headrace.deploy.run.health import Question, answer

    healthy, sentence = answer(Question(role, asked.run_dir(), ready), within_s)
    say(sentence)
    raise typer.Exit(ExitCode.OK if healthy else ExitCode.FINDINGS)


@contextlib.contextmanager
def chosen_fleet(asked: Asked, redis_url: str, fleet_id: str) -> Iterator[FactsReader]:
    """Give a reader of the fleet that the options name. The Redis of a run that has ended is started for this time.

    Raises `ConfigError`, `FleetError`, or `RunDirError` for a directory without a fleet.
    """
    from headrace.deploy.monitoring.facts import FactsReader, facts_of_run

    if not redis_url and not fleet_id:
        resolved, *others = resolve_each(asked)
        if others:
            detail = f"should name one of the {len(others) + 1} brokers; set HEADRACE_BROKER__INDEX"
            raise ConfigError(detail, key="broker.index")
        with _reader_of(asked.config, resolved) or facts_of_run(chosen_run(resolved.fleet.run_dir)) as reader:
            yield reader
        return
    if not redis_url or not fleet_id or asked.flags["fleet.run_dir"] is not None:
        raise ConfigError("name a run by --run-dir, or a fleet by --redis-url and --fleet-id together")
    with FactsReader(redis_url=named_redis(redis_url), fleet_id=fleet_id) as reader:
        yield reader


def _reader_of(config: Path | None, resolved: FleetConfig) -> FactsReader | None:
    """Return a reader of the fleet that a settings file names, where it has no fleet.json in its run directory."""
    from headrace.deploy.monitoring.facts import FactsReader

    named = named_fleet(resolved) if config is not None else None
    if named is None or (Path(resolved.fleet.run_dir) / "fleet.json").exists():
        return None
    return FactsReader(redis_url=named[0], fleet_id=named[1])

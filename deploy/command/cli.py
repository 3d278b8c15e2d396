"""The `headrace` command. Each function here only turns typed arguments into a call; other modules do the work.

An error that Headrace raises on purpose ends a command with one sentence on stderr and the error's exit code
(`schemas.errors.ExitCode`). A lack of memory or descriptors ends it with a sentence and 1. Any other error is a bug of
ours or of the user's code. It ends with a traceback and 1.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.deploy.command import keys_command, monitoring_commands, redis_command, role_commands
from headrace.deploy.command.option_table import command
from headrace.deploy.process.exit_record import exit_record_path, write_exit_record
from headrace.deploy.process.service_manager import service_manager
from headrace.deploy.run.annexes import COMMANDS, part
from headrace.deploy.run.named_code import with_found
from headrace.deploy.run.options import Asked, as_toml, chosen_run, named_fleet, resolve_each
from headrace.deploy.run.run_dir import KEYS_FOLDER, new_run_dir
from headrace.deploy.run.several_brokers import whole_run_dir
from headrace.deploy.terminal.logs import wants_tracebacks
from headrace.deploy.terminal.std_streams import ignore_closed_reader, say
from headrace.schemas.basics.stop_event import StoppedError
from headrace.schemas.errors import ConfigError, ExitCode, HeadraceError, machine_error

if TYPE_CHECKING:
    from headrace.deploy.report.summary import Summary
    from headrace.schemas.settings.config import FleetConfig

app = typer.Typer(
    name="headrace",
    help="Sampler workers for reinforcement learning behind a message broker.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(keys_command.app, name="keys")
app.add_typer(redis_command.app, name="redis")
app.add_typer(role_commands.app)
app.add_typer(monitoring_commands.app)
for _module, _word in COMMANDS.items():
    app.add_typer(import_module(_module).app, name=_word or None)


def main() -> None:
    """Run the command line: the entry point of the console script and of `python -m headrace.deploy`."""
    exit_record_at = exit_record_path()
    service_manager()
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # so that `package.module:make_env` is found here, as by `python -m`
    try:
        command_line()()
    except StoppedError as stopped:
        say(str(stopped), sys.stderr)
        write_exit_record(exit_record_at, ExitCode.OK)
    except Exception as error:
        told = error if isinstance(error, HeadraceError) else machine_error(error)
        if told is None:
            raise
        if wants_tracebacks():
            say(traceback.format_exc().rstrip(), sys.stderr)
        say(f"error: {told}", sys.stderr)
        write_exit_record(exit_record_at, told.exit_code, str(told))
        sys.exit(int(told.exit_code))
    except SystemExit as end:  # typer raises it at the end of a command, also for wrong arguments
        if end.code in (ExitCode.OK, ExitCode.USAGE):
            write_exit_record(exit_record_at, int(end.code))
        raise


@functools.cache
def command_line() -> Callable[[], None]:
    """Build and return the command line. Building it takes longer than most commands."""
    return typer.main.get_command(app)


@app.callback(invoke_without_command=True)
def _root(show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if show_version:
        say(f"headrace {version('headrace')}")
        raise typer.Exit


@command(
    app,
    "headrace up --env CartPole-v1 --workers 2 --num-envs 8 --seed 0 --until-return 475",
    "headrace up --config pendulum --seed 0",
    "headrace up --env CartPole-v1 --until-steps 20000 --run-dir runs/a --timeout-s 60 --json",
    "headrace up --resume runs/a --until-steps 50000",
    "headrace up --workers 1 --until-steps 20000 --set learner.learning_rate=0.0003",
    "headrace up --env CartPole-v1 --set sampling.env_placement=remote --env-hosts 2 --until-steps 50000",
    "headrace up --env CartPole-v1 --workers 1 --serve --set serving.http_port=5900 --until-return 475",
    "headrace up --env CartPole-v1 --listen 0.0.0.0     # for workers on other machines too",
    "headrace up --workers 4 --print-config",
    options="env workers num_envs env_hosts serve listen seed until_return until_steps timeout_s check_env new_run_dir"
    " resume config redis_url loggers dashboard record sets allow print_config as_json",
)
def up(
    asked: Asked,
    *,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run, and with its settings.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show every value and its origin, and do nothing.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="DIR", help="Record all batches there, as headrace record does.")
    ] = None,
    as_json: bool,
) -> None:
    """Run a whole fleet on this machine.

    It ends at its goal, its timeout or Ctrl-C; then it is drained and the ledger is shown.
    """
    from headrace.deploy.fleet.up import up as run_fleet

    found = None
    if resume is not None:
        asked, found = _resumed(resume, asked)
    if asked.flags["broker.host"]:
        asked = _with_keys(asked, found)
    asked = with_found(asked, found, with_loggers=True)
    if record is not None:
        part("check_pyarrow")()
        groups = {"record": "wait", **asked.settings.broker.consumer_groups}
        asked = asked.with_flags({"broker.consumer_groups": groups})
    if print_config:
        say(as_toml(asked).rstrip())
        return
    summary = run_fleet(
        asked.settings,
        as_json=as_json,
        config_path=asked.config,
        origin=asked.origin,
        resume=found is not None,
        record=record and record.absolute(),
    )
    _print_end(summary, asked.settings, as_json=as_json)
    if summary.failure is not None:
        raise summary.failure


def _with_keys(asked: Asked, found: Path | None) -> Asked:
    """Return the same with keys in the run directory, unless the settings, or those of the run, name others."""
    config = _without_keys(asked, found).settings
    run_dir = Path(config.fleet.run_dir or new_run_dir(config.sampling.env))
    keys = config.keys.dir or str(run_dir.absolute() / KEYS_FOLDER)
    return asked.with_flags({"keys.dir": keys, "fleet.run_dir": str(run_dir)})


def _without_keys(asked: Asked, found: Path | None) -> Asked:
    """Return the same with the run's own file. With `--listen` it is in a form that is valid without keys too."""
    own = replace(asked, config=asked.config or found)
    return own.with_flags({"broker.allow_insecure": True}) if asked.flags["broker.host"] else own


def _resumed(resume: Path, asked: Asked) -> tuple[Asked, Path]:
    """Return the settings for going on with a run, and the file with the run's own.

    Keys that `--listen` made are in the run directory, also if it was moved since.
    """
    from headrace.deploy.run.resume import existing_run

    if asked.flags["fleet.run_dir"] is not None:
        raise ConfigError("leave out --run-dir: --resume names the run directory", key="--resume")
    run = existing_run(resume)
    found, own = run / "settings.json", run.absolute() / KEYS_FOLDER
    asked = asked.with_flags({"fleet.run_dir": str(run)})
    without = _without_keys(asked, found)
    stored, is_stored = Path(without.settings.keys.dir), without.resolved[1].get("keys.dir") == str(found)
    if is_stored and stored.name == KEYS_FOLDER and own.is_dir() and not stored.exists():
        asked = asked.with_flags({"keys.dir": str(own)})
    return asked, found


def _print_end(summary: Summary, config: FleetConfig, *, as_json: bool) -> None:
    """Print the summary, and what to do next. A fleet that failed before its first step has no summary to show."""
    from headrace.deploy.report.summary import next_commands, print_summary

    with ignore_closed_reader(sys.stdout):
        if as_json:
            say(summary.as_json().decode())
            return
        if summary.failure is None or summary.steps:
            print_summary(summary, sys.stdout)
        for line in next_commands(summary, config):
            say(line)


@command(app, "headrace scale 8", "headrace scale 0 --run-dir runs/a", options="workers run_dir config")
def scale(
    asked: Asked,
    workers: Annotated[
        int, typer.Argument(metavar="WORKERS", min=0, max=1000, help="Workers that the run is to have on its machine.")
    ],
) -> None:
    """Change the number of workers of a run on this machine, while it runs.

    Those that go are drained: they ship what they have. Workers elsewhere come and go as they are started.
    """
    from headrace.deploy.fleet.scale import scale as scale_run

    scale_run(asked.run_dir(), workers, say)


@command(
    app,
    "headrace audit --strict",
    "headrace audit --run-dir runs/a --json",
    "headrace audit --deep runs/a",
    options="run run_dir config strict deep as_json",
)
def audit(
    asked: Asked,
    *,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when something does not add up.")] = False,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Compare recorders, log, learner, broker file and Redis of the run; exit 1 where two differ."
        ),
    ] = False,
    as_json: bool,
) -> None:
    """Check the books of a fleet.

    Shows the steps of a running or stopped fleet, and what became of them. A fleet that `headrace up` did not start is
    that of the Redis and the name in --config. Several brokers have books of their own: all are checked.
    """
    from headrace.deploy.report.audit import audit_run

    if deep:
        part("audit_deeply")(asked.run_dir(), as_json=as_json, stream=sys.stdout)
        return
    problems = []
    for resolved in resolve_each(asked):
        named = named_fleet(resolved)
        folder = whole_run_dir(resolved) if named is not None else chosen_run(resolved.fleet.run_dir)
        problems += audit_run(folder, as_json=as_json, stream=sys.stdout, named=named)
    if strict and problems:
        raise HeadraceError("the books do not balance: " + "; ".join(problems))

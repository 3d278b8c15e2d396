"""The `headrace` command. Each function here only turns typed arguments into a call; other modules do the work.

An error that Headrace raises on purpose ends a command with one sentence on stderr and the error's exit code
(`schemas.errors.ExitCode`). Any other error is a bug of ours or of the user's code. It ends with a traceback and 1.
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.console import Console

from headrace.deploy.command import (
    keys_command,
    monitoring_commands,
    policy_commands,
    ray_command,
    redis_command,
    role_commands,
    slurm_command,
)
from headrace.deploy.process.exit_record import exit_record_path, write_exit_record
from headrace.deploy.process.service_manager import service_manager
from headrace.deploy.run.named_code import resolve_found
from headrace.deploy.run.options import (
    Allow,
    AsJson,
    Asked,
    ConfigPath,
    Endpoint,
    Env,
    NewRunDirPath,
    NumEnvs,
    RedisUrl,
    RendezvousPlace,
    RunDirPath,
    Seed,
    Sets,
    chosen_run,
    describe_origin,
    examples,
    named_fleet,
    resolve_each,
    text_of,
)
from headrace.deploy.run.several_brokers import whole_run_dir
from headrace.deploy.terminal.output import wants_tracebacks, with_output_options
from headrace.deploy.terminal.std_streams import ignore_closed_reader, open_std_streams
from headrace.schemas.basics.printable import printable
from headrace.schemas.errors import ConfigError, ExitCode, HeadraceError, LedgerError

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
app.add_typer(ray_command.app, name="ray")
app.add_typer(slurm_command.app, name="slurm")
app.add_typer(role_commands.app)
app.add_typer(policy_commands.app)
app.add_typer(monitoring_commands.app)

Workers = Annotated[int | None, typer.Option("--workers", help="Sampler processes on this machine.")]
EnvHosts = Annotated[
    int | None, typer.Option("--env-hosts", help="Env hosts on this machine, for sampling.env_placement=remote.")
]
Serve = Annotated[
    bool | None, typer.Option("--serve", help="Clients elsewhere drive the episodes; fleet.json has the addresses.")
]
UntilReturn = Annotated[float | None, typer.Option(help="Stop at this mean return of 100 episodes.")]
UntilSteps = Annotated[int | None, typer.Option(help="Stop after this many env steps.")]
TimeoutS = Annotated[float | None, typer.Option(help="Give up after this many seconds (exit code 17).")]
CheckEnv = Annotated[
    bool | None,
    typer.Option("--check-env/--no-check-env", help="Build one env and step it once before anything starts."),
]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run, and with its settings.")
]
Tensorboard = Annotated[
    bool | None, typer.Option("--tensorboard", help="Log to RUN_DIR/tensorboard too (extra tensorboard).")
]
Wandb = Annotated[bool | None, typer.Option("--wandb", help="Log to Weights & Biases too (extra wandb).")]
Mlflow = Annotated[bool | None, typer.Option("--mlflow", help="Log to MLflow too (extra mlflow).")]
Dashboard = Annotated[
    bool | None, typer.Option("--dashboard/--no-dashboard", help="Serve a live page to browsers on this machine.")
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Show every value and its origin, and do nothing.")]


def main() -> None:
    """Run the command line: the entry point of the console script and of `python -m headrace.deploy`."""
    open_std_streams()
    exit_record_at = exit_record_path()
    service_manager()
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # so that `package.module:make_env` is found here, as by `python -m`
    try:
        command()()
    except HeadraceError as error:
        if wants_tracebacks():
            traceback.print_exc()
        with ignore_closed_reader(sys.stderr):
            print(printable(f"error: {error}"), file=sys.stderr, flush=True)  # noqa: T201
        write_exit_record(exit_record_at, error.exit_code, str(error))
        sys.exit(int(error.exit_code))
    except SystemExit as end:  # typer raises it at the end of a command, also for wrong arguments
        if end.code in (ExitCode.OK, ExitCode.USAGE):
            write_exit_record(exit_record_at, int(end.code))
        raise


@functools.cache
def command() -> Callable[[], None]:
    """Build and return the command line. Building it takes longer than most commands."""
    return typer.main.get_command(app)


@app.callback(invoke_without_command=True)
def _root(show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    if show_version:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.command(
    epilog=examples(
        "headrace up --env CartPole-v1 --workers 2 --num-envs 8 --seed 0 --until-return 475",
        "headrace up --config pendulum --seed 0",
        "headrace up --env CartPole-v1 --until-steps 20000 --run-dir runs/a --timeout-s 60 --json",
        "headrace up --resume runs/a --until-steps 50000",
        "headrace up --workers 1 --until-steps 20000 --set learner.learning_rate=0.0003",
        "headrace up --env CartPole-v1 --set sampling.env_placement=remote --env-hosts 2 --until-steps 50000",
        "headrace up --env CartPole-v1 --workers 1 --serve --set serving.port=5900 --until-return 475",
        "headrace up --workers 4 --print-config",
    )
)
@with_output_options
def up(
    env: Env = None,
    workers: Workers = None,
    num_envs: NumEnvs = None,
    env_hosts: EnvHosts = None,
    serve: Serve = None,
    seed: Seed = None,
    until_return: UntilReturn = None,
    until_steps: UntilSteps = None,
    timeout_s: TimeoutS = None,
    check_env: CheckEnv = None,
    run_dir: NewRunDirPath = None,
    resume: Resume = None,
    config: ConfigPath = None,
    redis_url: RedisUrl = None,
    tensorboard: Tensorboard = None,
    wandb: Wandb = None,
    mlflow: Mlflow = None,
    dashboard: Dashboard = None,
    sets: Sets = None,
    allow: Allow = None,
    print_config: PrintConfig = False,
    as_json: AsJson = False,
) -> None:
    """Run a whole fleet on this machine.

    It ends at its goal, its timeout or Ctrl-C; then it is drained and the ledger is shown.
    """
    from headrace.deploy.fleet.up import UpOptions
    from headrace.deploy.fleet.up import up as run_fleet
    from headrace.deploy.terminal.config_print import print_config as config_text

    own_config = config
    if resume is not None:
        run_dir, config = _resumed(resume, run_dir, config)
    flags = {
        "sampling.env": env,
        "fleet.workers": workers,
        "fleet.env_hosts": env_hosts,
        "serving.enabled": serve,
        "sampling.num_envs": num_envs,
        "sampling.seed": seed,
        "fleet.check_env": check_env,
        "fleet.until_return": until_return,
        "fleet.until_steps": until_steps,
        "fleet.timeout_s": timeout_s,
        "fleet.run_dir": text_of(run_dir),
        "redis.url": redis_url,
        "logging.tensorboard": tensorboard,
        "logging.wandb": wandb,
        "logging.mlflow": mlflow,
        "dashboard.enabled": dashboard,
    }
    asked = Asked(config, sets, flags, allow)
    resolved, origins = resolve_found(asked, with_loggers=True) if own_config is None else asked.resolve()
    if print_config:
        typer.echo(config_text(resolved, origins), nl=False)
        return
    summary = run_fleet(resolved, UpOptions(as_json, config, describe_origin(config, origins), resume is not None))
    _print_end(summary, resolved, as_json=as_json)
    if summary.failure is not None:
        raise summary.failure


def _resumed(resume: Path, run_dir: Path | None, config: Path | None) -> tuple[Path, Path]:
    """Return the run directory of the run to go on with, and the config file: by default that of its settings."""
    from headrace.deploy.run.resume import existing_run

    if run_dir is not None:
        raise ConfigError("leave out --run-dir: --resume names the run directory", key="--resume")
    run = existing_run(resume)
    return run, config or run / "settings.json"


def _print_end(summary: Summary, config: FleetConfig, *, as_json: bool) -> None:
    """Print the summary. A fleet that failed before its first step has only its error to show."""
    from headrace.deploy.report.summary import next_command, print_summary

    with ignore_closed_reader(sys.stdout):
        if as_json:
            typer.echo(summary.as_json().decode())
        elif summary.failure is None or summary.steps:
            print_summary(summary, sys.stdout)
            if command := next_command(summary, config):
                typer.echo(f"play its policy: {command}")


@app.command(epilog=examples("headrace ps", "headrace ps --run-dir runs/a --json | python -m json.tool"))
@with_output_options
def ps(run_dir: RunDirPath = None, config: ConfigPath = None, as_json: AsJson = False) -> None:
    """Show the fleet's processes, whether they live, and workers that came from elsewhere."""
    from headrace.deploy.process.proc_stat import is_alive
    from headrace.deploy.report.ps import all_processes, sessions_revoked, table
    from headrace.deploy.run.fleet_file import read_fleet_file

    resolved, _ = Asked(config, flags={"fleet.run_dir": text_of(run_dir)}).resolve()
    fleet = read_fleet_file(chosen_run(resolved) / "fleet.json")
    rows, missing = all_processes(fleet, time.time())
    revoked = sessions_revoked(fleet)
    if not as_json:
        Console().print(table(fleet, rows, missing, revoked))
        return
    supervisor = {"pid": fleet.supervisor_pid, "alive": is_alive(fleet.supervisor_pid)}
    facts = {"fleet_id": fleet.fleet_id, "state": fleet.state, "endpoints": fleet.endpoints, "supervisor": supervisor}
    typer.echo(orjson.dumps({**facts, "processes": rows, "sessions_revoked": revoked}).decode())


@app.command(epilog=examples("headrace scale 8", "headrace scale 0 --run-dir runs/a"))
@with_output_options
def scale(
    workers: Annotated[
        int, typer.Argument(metavar="WORKERS", min=0, max=1000, help="Workers that the run is to have on its machine.")
    ],
    run_dir: RunDirPath = None,
    config: ConfigPath = None,
) -> None:
    """Change the number of workers of a run on this machine, while it runs.

    Those that go are drained: they ship what they have. Workers elsewhere come and go as they are started.
    """
    from headrace.deploy.fleet.scale import scale as scale_run

    resolved, _ = Asked(config, flags={"fleet.run_dir": text_of(run_dir)}).resolve()
    scale_run(chosen_run(resolved), workers, typer.echo)


@app.command(
    epilog=examples(
        "headrace audit --strict",
        "headrace audit --run-dir runs/a --json",
        "headrace audit --deep runs/a",
    )
)
@with_output_options
def audit(
    run_dir: RunDirPath = None,
    config: ConfigPath = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 when something does not add up.")] = False,
    deep: Annotated[
        Path | None,
        typer.Option(
            "--deep",
            metavar="RUN",
            help="Compare recorders, log, learner, broker file and Redis of this run; exit 1 where two differ.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the books of a fleet.

    Shows the steps of a running or stopped fleet, and what became of them. A fleet that `headrace up` did not start is
    that of the Redis and the name in --config. Several brokers have books of their own: all are checked.
    """
    from headrace.deploy.report.audit_command import audit_deeply, audit_run

    if deep is not None:
        audit_deeply(deep, as_json=as_json, stream=sys.stdout)
        return
    problems = []
    for resolved in resolve_each(Asked(config, flags={"fleet.run_dir": text_of(run_dir)})):
        named = named_fleet(resolved)
        run = whole_run_dir(resolved) if named is not None else chosen_run(resolved)
        try:
            audit_run(run, strict=strict, as_json=as_json, stream=sys.stdout, named=named)
        except LedgerError as error:
            problems.append(error)
    if problems:
        raise problems[0] if len(problems) == 1 else LedgerError("; ".join(map(str, problems)))


@app.command(
    epilog=examples(
        "headrace chaos --minutes 3 --seed 7",
        "headrace chaos --minutes 10 --seed 7 --env my_package.envs:make_env --run-dir runs/chaos-7 --json",
        "headrace chaos --config cartpole --workers 4 --minutes 10",
        "headrace chaos --minutes 10 --seed 7 --print-plan > plan.json",
        "headrace chaos --plan plan.json",
    )
)
@with_output_options
def chaos(
    minutes: Annotated[float, typer.Option("--minutes", help="How long the faults go on.", min=0.1)] = 3.0,
    seed: Annotated[int, typer.Option("--seed", help="The schedule of faults is made from it alone.")] = 0,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="This schedule, JSON or TOML.")] = None,
    print_plan: Annotated[bool, typer.Option("--print-plan", help="Show the schedule, and start nothing.")] = False,
    env: Env = None,
    workers: Workers = None,
    num_envs: NumEnvs = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="New folder for fleet, evidence and report; default: runs/chaos-TIME."),
    ] = None,
    config: ConfigPath = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Try a real fleet: kill, stop, cut and disturb it by a schedule, and check what it promises.

    Compares the books with two sources of its own: an env that writes a byte a step, and a learner that records what
    it gets. Exit code 20 when a promise was broken.
    """
    from headrace.deploy.command.chaos_command import chaos as run_chaos

    flags = {"sampling.env": env, "fleet.workers": workers, "sampling.num_envs": num_envs}
    run_chaos(
        Asked(config, sets, flags),
        minutes=minutes,
        seed=seed,
        plan_path=plan,
        print_plan=print_plan,
        run_dir=run_dir,
        as_json=as_json,
    )


@app.command(
    epilog=examples(
        "headrace doctor",
        "headrace doctor --set fleet.workers=16 --json",
        "headrace doctor --endpoint tcp://127.0.0.1:5701   # on a worker's machine",
        "headrace doctor --rendezvous /shared/runs/a/rendezvous.json --set keys.dir=keys",
    )
)
@with_output_options
def doctor(
    endpoint: Endpoint = None,
    rendezvous: RendezvousPlace = None,
    run_dir: RunDirPath = None,
    config: ConfigPath = None,
    redis_url: RedisUrl = None,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine can run a fleet, or a worker of one elsewhere, by --endpoint or --rendezvous.

    Exit code 1 when it cannot. Starts nothing and leaves nothing behind.
    """
    from dataclasses import asdict

    from headrace.deploy.doctor.check import Verdict
    from headrace.deploy.doctor.examination import examine

    resolved, _ = Asked(config, sets, {"fleet.run_dir": text_of(run_dir), "redis.url": redis_url}).resolve()
    checks = list(examine(resolved, endpoint, rendezvous))
    fit = all(check.verdict is not Verdict.FAIL for check in checks)
    if as_json:
        typer.echo(orjson.dumps({"fit": fit, "checks": [asdict(check) for check in checks]}).decode())
    else:
        for check in checks:
            advice = f"; {check.advice}" if check.advice else ""
            typer.echo(f"{check.verdict:<5} {check.name:<14} {check.seen}{advice}")
        typer.echo(
            "\nThis machine can run a fleet." if fit else "\nThis machine cannot run a fleet: repair what failed."
        )
    raise typer.Exit(0 if fit else 1)

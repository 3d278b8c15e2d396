"""The table of options. An option that gives a setting, or that several files of commands share, is one row of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_origin, get_type_hints

import typer

from headrace.deploy.run.options import Asked, config_file, recipes
from headrace.deploy.terminal.logs import LogFormat, choose_output
from headrace.schemas.errors import ConfigError


class Row(NamedTuple):
    """An option. `setting`: the setting that it gives, by dotted name; "" for none."""

    setting: str
    kind: Any
    option: Any


def _row(setting: str, kind: Any, flag: str, text: str, default: Any = None, **how: Any) -> Row:
    return Row(setting, kind | None if default is None else kind, typer.Option(default, flag, help=text, **how))


_RECIPES = ", ".join(recipes())
_RENDEZVOUS = "Where the fleet's broker publishes its addresses: a file, a URL, or the name of its machine."

TABLE: Mapping[str, Row] = {
    "config": _row(
        "",
        Path,
        "--config",
        f"A fleet.toml, or the name of a recipe: {_RECIPES}; `--print-config` shows every key.",
        callback=config_file,
    ),
    "sets": _row(
        "",
        list[str],
        "--set",
        "Any other setting, also one in a table: module.config.hidden=[32]; may be repeated.",
        metavar="SECTION.KEY=VALUE",
    ),
    "allow": _row(
        "",
        list[str],
        "--allow",
        "Build this, though only a file beside the checkpoint names it: my_pkg:make_env; may be repeated.",
        metavar="PACKAGE:NAME",
    ),
    "as_json": _row("", bool, "--json", "One JSON object on stdout instead of text.", False),
    "endpoint": _row("", str, "--endpoint", "tcp://HOST:PORT or ipc:///PATH of the broker; default: from --run-dir."),
    "rendezvous": _row("fleet.rendezvous", str, "--rendezvous", _RENDEZVOUS, metavar="PATH|URL|dns://NAME"),
    "fleet_id": _row("fleet.fleet_id", str, "--fleet-id", "Name of the fleet; default: from --run-dir."),
    "run_dir": _row("fleet.run_dir", Path, "--run-dir", "Folder of the run; default: the newest one in runs/."),
    "run": Row("", Path | None, typer.Argument(None, metavar="RUN", help="The same as --run-dir.")),
    "new_run_dir": _row(
        "fleet.run_dir", Path, "--run-dir", "Folder of the run: fleet.json, logs, data; default: runs/ENV-TIME."
    ),
    "shared_run_dir": _row(
        "fleet.run_dir", Path, "--run-dir", "Folder of the run, shared by all nodes; default: runs/ENV-TIME."
    ),
    "redis_url": _row(
        "redis.url",
        str,
        "--redis-url",
        "redis://..., rediss://..., or a file that has it; without it `headrace up` starts one.",
    ),
    "listen": _row(
        "broker.host",
        str,
        "--listen",
        "Serve other machines too, by TCP at this address, with keys; makes RUN/keys where none are named.",
        metavar="HOST",
    ),
    "workers": _row("fleet.workers", int, "--workers", "Sampler processes on this machine."),
    "env_hosts": _row(
        "fleet.env_hosts", int, "--env-hosts", "Env hosts on this machine, for sampling.env_placement=remote."
    ),
    "until_return": _row("fleet.until_return", float, "--until-return", "Stop at this mean return of 100 episodes."),
    "until_steps": _row("fleet.until_steps", int, "--until-steps", "Stop after this many env steps."),
    "timeout_s": _row(
        "fleet.timeout_s",
        float,
        "--timeout-s",
        "End after this many seconds: with exit code 17 where a goal is not reached, or no step made.",
    ),
    "check_env": _row(
        "fleet.check_env", bool, "--check-env/--no-check-env", "Build one env and step it once before anything starts."
    ),
    "env": _row("sampling.env", str, "--env", "gymnasium id, or package.module:make_env."),
    "num_envs": _row("sampling.num_envs", int, "--num-envs", "Environments in each worker."),
    "lent_envs": _row("sampling.num_envs", int, "--num-envs", "Environments to lend, at most."),
    "open_episodes": _row("sampling.num_envs", int, "--num-envs", "Episodes that may be open at once."),
    "seed": _row("sampling.seed", int, "--seed", "Root of all seeds; without it every run differs."),
    "explore": _row("sampling.explore", bool, "--explore/--no-explore", "Sample actions, or take the best.", False),
    "serve": _row(
        "serving.enabled", bool, "--serve", "Clients elsewhere drive the episodes; fleet.json has the addresses."
    ),
    "http": _row("serving.http_port", int, "--http", "Port for HTTP; 0: a free one. Without it, no HTTP."),
    "port": _row("serving.port", int, "--port", "Port for ZeroMQ by TCP; default: as configured, or a free one."),
    "host": _row("serving.host", str, "--host", "Address for TCP, which needs keys. Without it, a Unix socket."),
    "loggers": _row(
        "logging.loggers",
        list[str],
        "--logger",
        "Log there too: tensorboard, wandb, mlflow (each an extra), or package.module:Class; may be repeated.",
        metavar="NAME",
    ),
    "dashboard": _row(
        "dashboard.enabled", bool, "--dashboard/--no-dashboard", "Serve a live page to browsers on this machine."
    ),
}
OUTPUT: Mapping[str, Row] = {
    "verbose": Row(
        "",
        bool,
        typer.Option(False, "--verbose", "-v", "--debug", help="Debug logs, and tracebacks of expected errors."),
    ),
    "quiet": Row("", bool, typer.Option(False, "--quiet", "-q", help="Only warnings, errors and the result.")),
    "log_format": _row(
        "", LogFormat, "--log-format", "Form of log lines: text to read, or a JSON object a line.", LogFormat.TEXT
    ),
    "no_color": _row("", bool, "--no-color", "No colors; as if NO_COLOR were set.", False),
}
"""The options that every command has."""

Function = Callable[..., None]


def command(
    app: typer.Typer, *lines: str, options: str = "", name: str | None = None, hidden: bool = False
) -> Callable[[Function], Function]:
    """Add the decorated function to `app` as a command, with `lines` to paste at the end of its help.

    `options`: the command's options in the order of its help, by default the parameters of the function. Each is a
    parameter that is `Annotated` with the option, or a name of TABLE. The function gets those that it has a parameter
    for. `asked` has all others, as the settings that they give.
    """

    def add(function: Function) -> Function:
        hints = get_type_hints(function, include_extras=True)
        own = {
            one.name: one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for one in inspect.signature(function).parameters.values()
            if one.name != "asked"
        }
        parameters = [
            own[word] if word in own and get_origin(hints[word]) is Annotated else _parameter(word, TABLE[word])
            for word in options.split() or own
        ]
        parameters += [_parameter(word, row) for word, row in OUTPUT.items()]

        @wraps(function)
        def run(**given: Any) -> None:
            choose_output(**{word: given.pop(word) for word in OUTPUT})
            passed = {word: given.pop(word) for word in own}
            if "asked" in hints:
                passed["asked"] = _asked(given)
            function(**passed)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, epilog=examples(*lines) if lines else None, hidden=hidden)(run)
        return function

    return add


def _parameter(name: str, row: Row) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=row.option, annotation=row.kind)


def _asked(given: dict[str, Any]) -> Asked:
    """Return the settings that these options give; without --allow, the command builds no code of found files."""
    config, sets = given.pop("config", None), given.pop("sets", None)
    allow = (given.pop("allow") or ()) if "allow" in given else None
    if (run := given.pop("run", None)) is not None:
        if given["run_dir"] is not None:
            raise ConfigError("RUN is the same as --run-dir: give one of them", key="--run-dir")
        given["run_dir"] = run
    flags = {TABLE[name].setting: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return Asked(config, sets, flags, allow)


def examples(*lines: str) -> str:
    """Return the end of a command's help: lines to paste."""
    return "Examples:\n\n\b\n" + "\n".join(f"  {line}" for line in lines)

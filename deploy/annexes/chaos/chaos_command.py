"""`headrace chaos`: makes or reads a plan, runs the trial, judges it, and reports."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table

from headrace.deploy.annexes.chaos.checks import Judgement, judge, lines_of
from headrace.deploy.annexes.chaos.processes import Folders
from headrace.deploy.annexes.chaos.schedule import make_plan, read_plan
from headrace.deploy.annexes.chaos.trial import Injected, Trial, TrialResult
from headrace.deploy.annexes.chaos.truth import ENV, Witnessed
from headrace.deploy.process.fleet_errors import FleetError
from headrace.deploy.run.options import Asked
from headrace.deploy.run.run_dir import new_run_dir
from headrace.deploy.terminal.console import PrintableConsole
from headrace.deploy.terminal.std_streams import ignore_closed_reader, say
from headrace.schemas.basics.run_files import replace_private
from headrace.schemas.errors import ConfigError, ExitCode, RunDirError, is_there, write_error
from headrace.schemas.settings.config import FleetConfig

PLAN, REPORT = "plan.json", "report.json"
PAUSE_S = 0.0002
"""Each env waits so long in a step. Small ones would take all processor time of the machine."""

DEFAULTS: Mapping[str, Any] = {
    "broker.lease_s": 3.0,
    "worker.connect_timeout_s": 600.0,
}
"""Settings of a trial that the user has not chosen. Faults are many, so silence is noticed soon; and a worker waits for
a fleet that is killed again and again on a busy machine.
"""

FIXED: dict[str, Any] = {
    "fleet.check_env": False,
    "fleet.until_return": None,
    "fleet.until_steps": None,
    "fleet.timeout_s": None,
    "learner.enabled": False,
    "supervisor.restart_attempts": 1_000_000,
    "worker.random_actions_before_weights": True,
}
"""Settings that make a trial: the check of an env would take steps, and the learner records."""

_SHOWN = 5
"""Broken promises that the error tells in full."""


def chaos(
    asked: Asked,
    *,
    minutes: float,
    seed: int,
    plan_path: Path | None,
    print_plan: bool,
    run_dir: Path | None,
    as_json: bool,
) -> None:
    """Run one trial. Raises `FleetError` when a promise was broken, `ConfigError`, or why no fleet starts."""
    config, origins = asked.resolved
    _refuse_other_kinds(config)
    config = config.replaced({key: value for key, value in DEFAULTS.items() if key not in origins} | FIXED)
    if plan_path is not None:
        plan = read_plan(plan_path)
    else:
        plan = make_plan(seed, minutes, config.fleet.workers, config.broker.lease_s)
    if print_plan:
        say(plan.as_json().decode())
        return
    if plan.workers != config.fleet.workers:
        fleets = f"the plan is for {plan.workers} workers, and the fleet has {config.fleet.workers}"
        raise ConfigError(f"{fleets}; add --workers {plan.workers}", key="--plan")
    folders = _make_folders(run_dir or new_run_dir("chaos"))
    _write_config(config, folders)
    replace_private(folders.root / PLAN, plan.as_json())
    stream = sys.stderr if as_json else sys.stdout
    tell = partial(say, stream=stream)
    tell(f"headrace chaos: seed {plan.seed}, {len(plan.events)} events in {plan.minutes:g} min; {folders.root}")
    outcome = Trial(plan, folders, config.sampling.num_envs, tell).run()
    tell("judging")
    judgement = judge(outcome)
    replay = shlex.join(["headrace", "chaos", "--plan", str(folders.root / PLAN), *_again(asked)])
    facts = _as_facts(outcome, judgement, replay)
    report = folders.root / REPORT
    replace_private(report, orjson.dumps(facts, option=orjson.OPT_INDENT_2))
    with ignore_closed_reader(stream):
        PrintableConsole(stream).print(_recovery_table(judgement))
    for line in lines_of(judgement):
        tell(line)
    tell(f"report: {report}")
    if as_json:
        say(orjson.dumps(facts).decode())
    if judgement.problems:
        problems = judgement.problems
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise FleetError(
            f"{len(problems)} broken promises: {'; '.join(problems[:_SHOWN])}{more}; all are in {report}; "
            f"the same schedule again: {replay}",
            ExitCode.CHAOS,
        )


def _refuse_other_kinds(config: FleetConfig) -> None:
    """Raise `ConfigError` for fleets whose envs cannot have a witness, or that other machines join."""
    sampling = config.sampling
    for key, wrong, why in (
        ("sampling.policies", bool(sampling.policies), "an env of several agents"),
        ("sampling.gym_env_vectorize_mode", sampling.gym_env_vectorize_mode is not None, "a whole vector"),
        ("sampling.env_placement", sampling.env_placement == "remote", "envs on env hosts"),
        ("sampling.synchronous", sampling.synchronous, "synchronous sampling, which needs a learner that trains"),
        ("serving.enabled", config.serving.enabled, "envs that clients drive"),
        ("broker.host", bool(config.broker.host), "a broker that serves by TCP"),
        ("keys.dir", bool(config.keys.dir), "keys"),
        ("redis.url", bool(config.redis.url), "a Redis of your own, which it would flush"),
    ):
        if wrong:
            raise ConfigError(f"headrace chaos cannot try {why} yet; leave it out", key=key)


def _make_folders(root: Path) -> Folders:
    folders = Folders(root.absolute())
    if is_there(folders.config):
        raise RunDirError(str(root), "a trial was run in it", "name a new folder with --run-dir")
    try:
        for folder in (folders.fleet, folders.truth, folders.record, folders.logs):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise write_error(str(root), error) from error
    return folders


def _write_config(config: FleetConfig, folders: Folders) -> None:
    """Write the fleet's configuration, with the witness around its env."""
    sampling = config.sampling
    witnessed = Witnessed(
        env=str(sampling.env),
        env_config=dict(sampling.env_config),
        folder=str(folders.truth),
        pause_s=PAUSE_S,
        faulty_slots=config.fleet.workers,
    )
    around = {"sampling.env": ENV, "sampling.env_config": witnessed.model_dump(), "fleet.run_dir": str(folders.fleet)}
    written = config.replaced(around).model_dump(mode="json", exclude_none=True)
    replace_private(folders.config, orjson.dumps(written, option=orjson.OPT_INDENT_2))


def _again(asked: Asked) -> list[str]:
    """Return the options of this call that its plan does not hold."""
    options = ["--config", str(asked.config)] if asked.config is not None else []
    names = {"sampling.env": "--env", "sampling.num_envs": "--num-envs", "fleet.workers": "--workers"}
    for key, value in asked.flags.items():
        options += [names[key], str(value)] if value is not None else []
    for text in asked.sets or ():
        options += ["--set", text]
    return options


# -- the report -------------------------------------------------------------------------------------------------------


def _as_facts(outcome: TrialResult, judgement: Judgement, replay: str) -> dict[str, Any]:
    """Return the report as plain values, for JSON."""
    return {
        "held": not judgement.problems,
        "problems": judgement.problems,
        "replay": replay,
        "folder": str(outcome.folders.root),
        "plan": outcome.plan.model_dump(mode="json"),
        "cut_short": outcome.cut_short,
        "checks": [asdict(check) for check in judgement.checks],
        "steps": judgement.steps,
        "episodes": judgement.episodes,
        "events": [_event_facts(injected, outcome.began) for injected in outcome.injected],
        "recovery": judgement.recovery,
        "lives": outcome.lives,
        "drained": [{"slot": slot, "incarnation": incarnation} for slot, incarnation in sorted(outcome.living)],
    }


def _recovery_table(judgement: Judgement) -> Table:
    """Return the time of recovery from each kind of event, for the terminal."""
    shown = Table("event", title="time to the next new step at the learner", title_justify="left")
    for column in ("times", "skipped", "median s", "max s"):
        shown.add_column(column, justify="right")
    for name, seen in judgement.recovery.items():
        times = ("-" if seconds is None else f"{seconds:.2f}" for seconds in (seen["median_s"], seen["max_s"]))
        shown.add_row(name, str(seen["events"]), str(seen["skipped"] or ""), *times)
    return shown


def _event_facts(injected: Injected, began: float) -> dict[str, Any]:
    return {
        **injected.event.model_dump(mode="json"),
        "injected_at_s": round(injected.at - began, 3),
        "skipped": injected.skipped,
        "recovery_s": injected.recovery_s,
    }

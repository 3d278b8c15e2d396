"""The command `headrace rerun`: repeats an episode in which an env failed, with the same seed, task and actions."""

from __future__ import annotations

import bdb
import logging
import pdb
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.deploy.command.option_table import command
from headrace.deploy.run.annexes import part
from headrace.deploy.run.options import Asked
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.basics.printable import one_line, to_paste
from headrace.schemas.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from headrace.deploy.annexes.rerun.repeated import Repeated
    from headrace.workers.reruns.failure_files import FailureFacts, KeptFailure

log = logging.getLogger("headrace.deploy")
app = typer.Typer()

_WHY_NONE = (
    "; a worker elsewhere keeps them on its own host. None is kept of an inline env that ended its worker, as its "
    'steps ended with it: with sampling.env_placement = "process" the next one is. None is kept of an external env, '
    "or of a native vector, whose envs fail together, unless an env of a sync or async one raised"
)


@command(
    app,
    "headrace rerun runs/a",
    "headrace rerun runs/a --list",
    "headrace rerun runs/a --failure 0-0-3 --pdb",
    "headrace rerun runs/a --episode 00c0ffee --render failure.mp4",
    options="run failure episode listed debug render env config sets allow",
)
def rerun(
    asked: Asked,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory, on the host of the worker.")],
    failure: Annotated[str, typer.Option("--failure", help="Which one; default: the newest.", metavar="NAME")] = "",
    episode: Annotated[
        str, typer.Option("--episode", help="The one of this episode: the first digits of its id.", metavar="ID")
    ] = "",
    listed: Annotated[bool, typer.Option("--list", help="List the failures, the newest first.")] = False,
    debug: Annotated[
        bool,
        typer.Option("--pdb", help="Build the env in this process, and stop in a debugger where it fails, or hangs."),
    ] = False,
    render: Annotated[
        Path | None, typer.Option("--render", help="MP4 file for a video of the episode (extra video).")
    ] = None,
) -> None:
    """Repeat an episode in which an env failed: build the env, reset it, and send it the same actions.

    Compare each observation and reward with those of the worker. Exit code 0: it failed as before. 1: it did not.
    """
    from headrace.workers.reruns.failure_files import failures_of, read_failure

    set_up_logging(Identity("", "rerun"))
    if failure and episode:
        raise ConfigError("give either --failure or --episode", key="--episode")
    names = failures_of(run)
    if not names and not episode:
        raise ConfigError(f"no failure of an env is kept in {run}{_WHY_NONE}")
    if listed:
        say("\n".join(_line(read_failure(run, name)) for name in names))
        return
    from headrace.deploy.annexes.rerun.replay import is_same
    from headrace.deploy.fleet.roles import no_exit_from
    from headrace.schemas.errors import EnvError

    kept = _of_episode(run, names, episode) if episode else read_failure(run, failure or names[0])
    say(_line(kept))
    with no_exit_from(EnvError, "the env"):
        repeated = _repeat(asked, run, kept, debug=debug, render=render)
    if repeated.error is not None and not debug:
        say("".join(traceback.format_exception(repeated.error)).rstrip())
    say(verdict(kept.facts, repeated))
    if repeated.error is None or repeated.difference or not is_same(kept.facts, repeated.error):
        raise typer.Exit(int(ExitCode.FAILURE))


def _of_episode(run: Path, names: Sequence[str], episode: str) -> KeptFailure:
    """Return the failure of the episode whose id begins with `episode`. Raises `ConfigError`."""
    from headrace.workers.reruns.failure_files import read_failure

    found = [kept for name in names if (kept := read_failure(run, name)).facts.episode_id.startswith(episode)]
    if not found:
        shown = f"headrace replay RECORDING --episode {to_paste(episode)} --render F.mp4 --run-dir {run}"
        message = f"no failure in {run} is of episode {episode!r:.80}; of one in a recording make a film by: {shown}"
        raise ConfigError(message, key="--episode")
    if len(found) > 1:
        raise ConfigError(f"{episode!r:.80} begins the ids of several episodes; give more digits", key="--episode")
    return found[0]


def _repeat(asked: Asked, run: Path, kept: KeptFailure, *, debug: bool, render: Path | None) -> Repeated:
    from headrace.deploy.annexes.rerun.replay import repeat
    from headrace.deploy.trained.saved_policy import settings_for
    from headrace.schemas.errors import EnvError, words_of
    from headrace.workers.config import runner_config
    from headrace.workers.fleet.user_side import envs_apart

    settings = settings_for(str(run), asked).settings.replaced({"fleet.run_dir": ""})
    facts, sampling = kept.facts, settings.sampling
    if (facts.env, facts.env_config) != (str(sampling.env), sampling.env_config):
        log.warning("the settings have changed since: the worker's env was %s, %s", facts.env, facts.env_config)
    config, debugger = runner_config(settings), _debug if debug else None
    if render is None:
        with envs_apart() as calls:
            return repeat(config, kept, calls, debugger)
    config = config.model_copy(update={"env_config": {**config.env_config, "render_mode": "rgb_array"}})
    with part("EpisodeVideo")(render) as video, envs_apart() as calls:
        repeated = repeat(config, kept, calls, debugger, video.watch)
        if repeated.error is not None and repeated.at == "construction" != facts.at:
            raise EnvError(f'the env cannot be built with render_mode = "rgb_array": {words_of(repeated.error)}')
    say(f"{render}: {video.frames} pictures" if video.frames else f"no video: it failed at {repeated.at}")
    return repeated


def _debug(repeated: Repeated, error: BaseException) -> None:
    if isinstance(error, bdb.BdbQuit):
        return  # the user has left the debugger
    say(f"{type(error).__name__} at {repeated.at}: {error}")
    if error.__traceback__ is None:
        say("It was found in what the env returned, so there is no place in the env to stop at.")
    else:
        pdb.post_mortem(error.__traceback__)


def _line(kept: KeptFailure) -> str:
    facts = kept.facts
    said = f"{kept.name}: env {facts.lane} of worker {facts.worker_index} failed at {facts.at}"
    why_not = f" (cannot be repeated: {facts.problem})" if facts.problem else ""
    return one_line(f"{said}: {facts.error}: {facts.message}{why_not}")


def verdict(facts: FailureFacts, repeated: Repeated) -> str:
    """Say what came of the repetition."""
    from headrace.deploy.annexes.rerun.replay import is_same
    from headrace.workers.envs.failures import in_its_env

    said = []
    if repeated.difference:
        said.append(
            f"differs from what the worker saw at {repeated.differs_at} ({repeated.difference}): the env is not "
            "deterministic, or keeps something from one episode to the next"
        )
    if repeated.error is None:
        said.append(f"did not fail: its last call was {repeated.at}")
    elif isinstance(repeated.error, bdb.BdbQuit):
        said.append(f"the debugger was left at {repeated.at}")
    else:
        kind, message = in_its_env(repeated.error)
        same = "the same error" if is_same(facts, repeated.error) else f"another error: {kind}: {message}"
        said.append(f"failed again at {repeated.at} with {same}")
    return "\n".join(said)

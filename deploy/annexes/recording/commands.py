"""The commands about recordings: `record` writes the batches of a fleet, `replay` shows an episode as a video."""

from __future__ import annotations

import logging
import math
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.deploy.annexes.recording import check_pyarrow
from headrace.deploy.annexes.recording.exporting import check_recording
from headrace.deploy.command.option_table import command
from headrace.deploy.run.options import Asked
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.basics.stop_event import stop_event
from headrace.schemas.errors import ConfigError

log = logging.getLogger("headrace.deploy")
app = typer.Typer()


@command(
    app,
    "headrace record runs/a --dir recording",
    "headrace record runs/a --dir recording --group archive",
    "headrace record http://HEAD:8000/rendezvous.json --dir recording",
)
def record(
    run: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Run directory or rendezvous; of several brokers, one of each.")
    ],
    folder: Annotated[Path, typer.Option("--dir", help="Folder of the recording, which goes on there.")],
    max_bytes: Annotated[
        float, typer.Option("--max-bytes", min=1, help="Remove the oldest files beyond this size, such as 50e9.")
    ] = math.inf,
    max_age_s: Annotated[
        float, typer.Option("--max-age-s", min=1, help="Remove files that were merged so many seconds ago.")
    ] = math.inf,
    group: Annotated[str, typer.Option("--group", help="Name of its consumer group.")] = "record",
) -> None:
    """Record each batch of a fleet in Parquet files, until the fleet ends or SIGTERM.

    It reads as a consumer group, whose name in broker.consumer_groups says whether workers wait for it. Needs the extra
    record.
    """
    with stop_event() as stopping:  # before imports, which take a while
        check_pyarrow()
        from headrace.deploy.annexes.recording.recording_folder import RecordingFolder
        from headrace.deploy.annexes.recording.recording_loop import Recording
        from headrace.learner_stub import EpisodeStream
        from headrace.learner_stub.link.fleet_place import find_fleet
        from headrace.schemas.errors import writing

        set_up_logging(Identity("", "record"))
        with writing(folder):
            recorded = RecordingFolder(folder)
        with recorded:
            options: dict[str, Any] = {"group": group, "position": recorded.position, "auto_commit": False}
            endpoint, options = find_fleet(run[0] if len(run) == 1 else run, 60.0, options)
            with EpisodeStream(endpoint, **options) as stream:
                log.info(
                    "headrace %s records group %s of %s in %s, from file %d on",
                    *(version("headrace"), group, stream.endpoint, folder, recorded.number + 1),
                )
                recording = Recording(stream, recorded, max_bytes=max_bytes, max_age_s=max_age_s)
                recording.run(stopping)
    say(recording.in_words())


@command(
    app,
    "headrace replay recording --render best.mp4 --run-dir runs/a",
    "headrace replay recording --episode 00c0ffee --render episode.mp4 --env CartPole-v1",
    options="recording episode render fps env run_dir config sets allow",
)
def replay(
    asked: Asked,
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="The folder of the recording.")],
    render: Annotated[Path, typer.Option("--render", help="MP4 file for the video (extra video).")],
    episode: Annotated[
        str, typer.Option("--episode", metavar="best|worst|ID", help="By return, or the first digits of its id.")
    ] = "best",
    fps: Annotated[int, typer.Option("--fps", min=1, help="Pictures per second, where they are recorded.")] = 30,
) -> None:
    """Show an episode of a recording as a video.

    Without recorded pictures it builds the env, which the other options name, and sends it the same seed, task and
    actions. Where the env departs from the recording, there is no video.
    """
    check_recording(recording)
    from headrace.deploy.annexes.recording import episode_film
    from headrace.deploy.fleet.roles import no_exit_from
    from headrace.deploy.trained.saved_policy import settings_for
    from headrace.schemas.errors import EnvError
    from headrace.workers.config import runner_config

    set_up_logging(Identity("", "replay"))
    found, spaces = episode_film.find_episode(recording, episode)
    pictures = episode_film.pictures_of(found, spaces)
    if pictures is not None:
        frames = episode_film.film(pictures, render, fps)
    else:
        run_dir = asked.flags["fleet.run_dir"]
        if run_dir is None and asked.config is None and asked.flags["sampling.env"] is None:
            raise ConfigError(
                "no pictures are recorded; name the env with --env, or its run with --run-dir", key="--env"
            )
        settings = (settings_for(run_dir, asked) if run_dir else asked).settings.replaced({"fleet.run_dir": ""})
        with no_exit_from(EnvError, "the env"):
            frames = episode_film.film_env(found, spaces, runner_config(settings), render)
    of = f"{len(found):,} steps, return {found.episode_return:.6g}, {found.end.name}"
    say(f"{render}: {frames:,} pictures of episode {found.episode_id} ({of})")

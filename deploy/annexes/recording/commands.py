"""The command `headrace record`: the batches of a fleet into Parquet files."""

from __future__ import annotations

import logging
import math
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from headrace.deploy.annexes.recording import NEEDS_PYARROW
from headrace.deploy.command.option_table import command
from headrace.deploy.terminal.logs import Identity, set_up_logging
from headrace.deploy.terminal.std_streams import say
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
    if find_spec("pyarrow") is None:
        raise ConfigError(NEEDS_PYARROW)
    from headrace.deploy.annexes.recording.recording_folder import RecordingFolder
    from headrace.deploy.annexes.recording.recording_loop import Recording
    from headrace.learner_stub import EpisodeStream
    from headrace.schemas.basics.stop_event import stop_event
    from headrace.schemas.errors import writing

    set_up_logging(Identity("", "record"))
    with writing(folder):
        recorded = RecordingFolder(folder)
    where = run[0] if len(run) == 1 else run
    with (
        recorded,
        EpisodeStream.of(where, group=group, position=recorded.position, auto_commit=False) as stream,
        stop_event() as stopping,
    ):
        log.info(
            "headrace %s records group %s of %s in %s, from file %d on",
            *(version("headrace"), group, stream.endpoint, folder, recorded.number + 1),
        )
        recording = Recording(stream, recorded, max_bytes=max_bytes, max_age_s=max_age_s)
        recording.run(stopping)
    say(recording.in_words())

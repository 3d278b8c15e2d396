"""Another rank than 0 in a process of its own. It writes a line of JSON for each round, before it asks for the next.

python -m support.pipeline.rank_process ENDPOINT FILE OPTIONS

ENDPOINT has spaces between those of several brokers. OPTIONS is JSON: what `EpisodeStream` takes, and "spaces": true
for a rank that asks for them first. The last line is {"error": ...} or {"ended": ...}.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from headrace.learner_stub import EpisodeStream
from headrace.schemas.errors import HeadraceError


def told(batch: Any) -> list[Any]:
    """Return what makes a batch known: its source, its steps, and the episodes of its chunks."""
    return [batch.slot, batch.steps, [[chunk.episode_id, chunk.chunk_index] for chunk in batch]]


def main(endpoint: str, file: str, options: str) -> None:
    with Path(file).open("ab") as out:

        def say(content: Any) -> None:
            out.write(orjson.dumps(content) + b"\n")
            out.flush()

        try:
            chosen = orjson.loads(options)
            asks = chosen.pop("spaces", False)
            with EpisodeStream(endpoint.split(), **chosen) as stream:
                say({"open": stream.rank})
                if asks:
                    say({"spaces": repr(stream.spaces())})
                while batches := stream.round_of(1):
                    say({"round": [told(batch) for batch in batches]})
                say({"ended": stream.ended})
        except HeadraceError as error:
            say({"error": f"{type(error).__name__}: {error}"})
        except KeyboardInterrupt:
            say({"error": "KeyboardInterrupt"})


if __name__ == "__main__":
    main(*sys.argv[1:])

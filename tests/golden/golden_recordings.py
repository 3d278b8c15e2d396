"""A recording of each release, which every later version reads.

    python tests/golden/golden_recordings.py

writes `recording_VERSION.tar.xz` of the version that the code has, and nothing if it is there. Run it for a release.
The archive has a folder `recording`, with one merged number and others in `unmerged`, and `expected.json`: the
episodes as they were before they were recorded, with a checksum of each column.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

import headrace

FOLDER = Path(__file__).parent


def path_of(version: str) -> Path:
    """The record of a version."""
    return FOLDER / f"recording_{version}.tar.xz"


def told(columns: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """What is expected of an episode: these facts, and the form and the checksum of its columns."""
    forms = {
        name: [column.dtype.str, [*column.shape], xxhash.xxh3_64_hexdigest(np.ascontiguousarray(column).tobytes())]
        for name, column in sorted(columns.items())
    }
    return {**facts, "columns": forms}


def main() -> None:
    """Write the record of this version, if there is none."""
    path = path_of(headrace.__version__)
    if path.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        expected = record(Path(folder) / "recording")
        (Path(folder) / "expected.json").write_bytes(orjson.dumps(expected, option=orjson.OPT_INDENT_2))
        with tarfile.open(path, "w:xz") as archive:
            for name in ("expected.json", "recording"):
                archive.add(Path(folder) / name, name)


def record(path: Path) -> list[dict[str, Any]]:
    """Make the recording, of two modules. Return what is expected of its episodes."""
    sys.path.insert(0, str(FOLDER.parent))
    from headrace.deploy.annexes.recording.compaction import compact
    from headrace.schemas.chunks.chunk import ChunkEnd
    from headrace.schemas.chunks.spaces import Box, Dict, Discrete
    from support.pipeline.recordings import Played, make_recording

    camera = Box(shape=(24, 16, 3), dtype="|u1", low=0, high=255)
    scene = Dict(spaces={"arm": Box(shape=(3,), dtype="<f4"), "camera": camera})
    of_modules = {
        "default_policy": (scene, Discrete(n=4), [Played(4), Played(4, ChunkEnd.ABORTED, task={"level": 2})]),
        "other": (Box(shape=(2,), dtype="<f4"), Box(shape=(2,), dtype="<f4"), [Played(4, ChunkEnd.TRUNCATED, None)]),
    }
    expected = []
    for module, (observation, action, episodes) in of_modules.items():
        compact(path, all_now=True)  # those of the module before
        make_recording(path, (observation, action), *episodes, module=module)
        for each in episodes:
            facts = {"seed": each.seed, "end": each.end.name, "task": each.task, "steps": each.steps}
            expected.append(told(each.columns, episode_id=each.id, module=module, **facts))
    return expected


if __name__ == "__main__":
    main()

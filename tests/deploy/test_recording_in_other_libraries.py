"""The merged files of a recording, read by DuckDB and polars: each row once, with the values of its step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install 'headrace[record]'")

from headrace.deploy.annexes.recording.compaction import compact
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Box, Dict, Discrete
from support.pipeline.recordings import Played, make_recording

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "recording.md"
SCENE = Dict(
    spaces={"arm": Box(shape=(2, 3), dtype="<f4"), "camera": Box(shape=(8, 6, 3), dtype="|u1", low=0, high=255)}
)


class Later(Played):
    """An episode of another id than those of a recording's first number."""

    def draw(self, number: int, *spaces: Any) -> None:
        super().draw(number + 10, *spaces)


EPISODES: list[list[Played]] = [
    [Played(7), Played(2, ChunkEnd.TRUNCATED, seed=None, task={"level": 3}, agent="right")],
    [Later(6, ChunkEnd.TRUNCATED), Later(4, ChunkEnd.ABORTED), Later(5, ChunkEnd.ONGOING)],
]
ALL = [*EPISODES[0], *EPISODES[1]]


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recording of two merged numbers, in the folder `recording` of the working directory."""
    for episodes in EPISODES:
        make_recording(tmp_path / "recording", (SCENE, Discrete(n=3)), *episodes)
        compact(tmp_path / "recording", all_now=True)
    assert len(list((tmp_path / "recording").glob("steps-*"))) == 2
    monkeypatch.chdir(tmp_path)
    return tmp_path / "recording"


def check_steps(rows: list[dict[str, Any]]) -> None:
    """The rows, by episode and step, have the values that were drawn."""
    for episode in ALL:
        own = [row for row in rows if row["episode_id"] == episode.id]
        assert [row["t"] for row in own] == list(range(episode.steps))
        assert {row["agent"] for row in own} == {episode.agent}
        for name, column in episode.columns.items():
            values = [row[name] for row in own]
            values = [np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value for value in values]
            shown = np.asarray(values, column.dtype).reshape(-1, *column.shape[1:])
            np.testing.assert_array_equal(shown, column[: episode.steps], name)
    assert len(rows) == sum(episode.steps for episode in ALL)


@pytest.mark.thorough
@pytest.mark.usefixtures("recording")
def test_duckdb_reads_each_step_and_answers_the_questions_of_the_guide() -> None:
    duckdb = pytest.importorskip("duckdb", reason="pip install 'headrace[long]'")
    files = "read_parquet('recording/steps-*.parquet', union_by_name = true)"
    table = duckdb.sql(f"SELECT * FROM {files} ORDER BY episode_id, t")
    check_steps([dict(zip(table.columns, row, strict=True)) for row in table.fetchall()])

    (block,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    returns, aborted = (duckdb.sql(query).fetchall() for query in block.split(";")[:2])
    whole = [episode for episode in ALL if episode.end in (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED)]
    assert sum(row[2] for row in returns) == len(whole)
    total = sum(episode.columns["rewards"].sum() for episode in whole)
    assert sum(row[2] * row[3] for row in returns) == pytest.approx(total)
    assert aborted == [("env_exception", 1)]


@pytest.mark.thorough
@pytest.mark.usefixtures("recording")
def test_pandas_answers_the_question_of_the_guide() -> None:
    pytest.importorskip("pandas", reason="pip install 'headrace[long]'")
    (block,) = re.findall(r"```python\n(.*?import pandas.*?)```", PAGE.read_text(), re.DOTALL)
    names = dict[str, Any]()
    exec(block.rpartition("```python\n")[2], names)  # noqa: S102
    whole = [episode for episode in ALL if episode.end in (ChunkEnd.TERMINATED, ChunkEnd.TRUNCATED)]
    assert names["lives"]["count"].sum() == len(whole)
    assert names["whole"]["episode_return"].sum() == pytest.approx(sum(one.columns["rewards"].sum() for one in whole))


@pytest.mark.thorough
@pytest.mark.usefixtures("recording")
def test_polars_reads_each_step() -> None:
    polars = pytest.importorskip("polars", reason="pip install 'headrace[long]'")
    check_steps(polars.scan_parquet("recording/steps-*.parquet").sort("episode_id", "t").collect().to_dicts())
    ends = polars.scan_parquet("recording/chunks-*.parquet").filter(polars.col("end") == "ABORTED").collect()
    assert ends["reason"].to_list() == ["env_exception"]

"""State columns: one row for each chunk with steps, on the wire and in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import golden_samples
import numpy as np
import pytest
from golden_samples import SPACES, encoded, make_recurrent_batch

from headrace.schemas.errors import DecodeError
from support.decode_batch import decode_batch

BOX = SPACES["box"]


def test_each_chunk_with_steps_has_one_state_row_and_a_marker_has_none() -> None:
    _, batch = decode_batch(encoded(make_recurrent_batch()), *BOX)
    first, marker, third, last = batch
    assert batch.state_offsets.tolist() == [0, 1, 1, 2, 3]
    assert [chunk.state_in["h"].tolist() for chunk in (first, third, last)] == [[0, 1], [2, 3], [4, 5]]
    assert [int(chunk.state_in["age"]) for chunk in (first, third, last)] == [7, 8, 9]
    assert marker.state_in == {}
    assert list(first.columns) == ["logp", "logits"]


def test_selected_chunks_keep_their_state() -> None:
    selected = make_recurrent_batch().select(np.array([False, True, True, True]))
    assert [chunk.state_in.get("age", -1) for chunk in selected] == [-1, 8, 9]
    decode_batch(encoded(selected), *BOX)


def test_a_slice_has_state_only_if_it_starts_where_the_chunk_starts() -> None:
    chunk = make_recurrent_batch()[0]
    assert chunk[0:2].state_in["age"] == 7
    assert chunk[1:3].state_in == {}


@pytest.mark.parametrize("column", [np.zeros((4, 2)), np.zeros((6, 2)), np.zeros(()), np.zeros((0, 2))])
def test_a_state_column_of_another_number_of_rows_is_refused(column: Any) -> None:
    batch = make_recurrent_batch()
    batch.arrays["state_in/h"] = column
    with pytest.raises(DecodeError, match=r"state_in/h.*not 3 rows"):
        decode_batch(encoded(batch), *BOX)


def test_the_golden_sample_is_iterated_with_its_state() -> None:
    path = Path(golden_samples.__file__).parent / "batch_recurrent.bin"
    _, batch = decode_batch(golden_samples.read(path), *BOX)
    assert [len(chunk.state_in) for chunk in batch] == [2, 0, 2, 2]

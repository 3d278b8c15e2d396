"""The columns of lanes on other hosts, and their rows in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Spaces, column_dtype, leaf_shape, leaves
from headrace.schemas.errors import DecodeError
from headrace.schemas.messages.env_messages import EnvAnswers
from headrace.workers.envs.actions import write_actions
from headrace.workers.envs.bounds import unsound_rewards

Rows = list[tuple[NDArray[Any], list[int], NDArray[Any]]]
"""(column, places, one row for each place)."""


class RemoteColumns:
    """The columns of `width` lanes. Columns of observations have the names by which the policy knows them."""

    def __init__(self, spaces: Spaces, width: int) -> None:
        def columns(root: str, space: Any) -> dict[str, NDArray[Any]]:
            return {
                name: np.zeros((width, *leaf_shape(leaf)), column_dtype(leaf)) for name, leaf in leaves(space, root)
            }

        self.observations = columns("obs", spaces.observation)
        self.first = columns("obs", spaces.observation)
        self.actions = columns("actions", spaces.action)
        self.rewards = np.zeros(width, np.float64)

    def write_actions(self, lanes: Sequence[int] | None, columns: Mapping[str, NDArray[Any]], root: str) -> None:
        """Write the rows of `lanes` (None: all) of the policy's columns."""
        write_actions(self.actions, lanes, columns, root)

    def action_rows(self, lanes: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Return a copy of the actions of `lanes`, in order."""
        return {name: column[lanes] for name, column in self.actions.items()}

    def check(self, told: EnvAnswers, arrays: Mapping[str, NDArray[Any]]) -> Rows:
        """Return the arrays of a message as rows of the columns. Raises `DecodeError` for arrays that do not fit."""
        began = [place for place, _ in told.began]
        rows: Rows = []
        expected = {"rewards": (self.rewards, told.stepped)} if told.stepped else {}
        if told.stepped:
            expected |= {name: (column, told.stepped) for name, column in self.observations.items()}
        if began:
            expected |= {f"first{name[3:]}": (column, began) for name, column in self.first.items()}
        if arrays.keys() != expected.keys():
            raise DecodeError(
                "bad_message", f"answers with arrays {sorted(arrays)!r:.200}, not {sorted(expected)!r:.200}"
            )
        for name, (column, places) in expected.items():
            given, shape = arrays[name], (len(places), *column.shape[1:])
            if given.shape != shape or given.dtype != column.dtype:
                seen, due = f"{given.dtype} {given.shape}", f"{column.dtype} {shape}"
                raise DecodeError("bad_message", f"array {name!r:.80} of answers is {seen}, not {due}")
            rows.append((column, places, given))
        if told.stepped and len(unsound_rewards(arrays["rewards"])):
            raise DecodeError("bad_message", "rewards of answers are not finite, or too large")
        return rows

    def write(self, rows: Rows, lanes: Mapping[int, int]) -> None:
        """Write the rows of the places in `lanes`, each to the place's lane."""
        for column, places, given in rows:
            known = [i for i, place in enumerate(places) if place in lanes]
            column[[lanes[places[i]] for i in known]] = given[known]

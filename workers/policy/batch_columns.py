"""The columns of a policy's batches beyond the leaves of its spaces, to check chunks that clients cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.schemas.chunks.batch import OFF_POLICY, STATE_IN, ChunkBatch, belongs_to_space
from headrace.schemas.chunks.chunk import LOOKBACK
from headrace.schemas.chunks.spaces import Spaces, column_dtype, leaf_shape, leaves
from headrace.schemas.errors import DecodeError
from headrace.schemas.settings.sampling_settings import SamplingSettings
from headrace.workers.envs.bounds import blank_columns
from headrace.workers.policy.acting import SAMPLERS_OWN
from headrace.workers.policy.acting_device import ActingDevice
from headrace.workers.policy.action_chunks import ActionChunks, make_actor

Kind = tuple[np.dtype[Any], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PolicyColumns:
    """The columns that each batch with steps has. A batch of end markers alone may have fewer."""

    kinds: Mapping[str, Kind]
    looks_back: bool

    @classmethod
    def of(
        cls,
        module: Any,
        spaces: Spaces,
        env_spaces: Spaces,
        settings: SamplingSettings,
        *,
        maps: bool,
        device: ActingDevice | None = None,
        rows: int = 1,
    ) -> PolicyColumns:
        """Return the columns of external envs' batches by `module`, found by one pass on `rows` blank observations.

        `spaces` are the module's. `maps`: module_to_env makes the envs' actions. The module is moved to `device`.
        Raises `ModuleError`.
        """
        seen = blank_columns(spaces.observation, "obs", rows)
        actor = make_actor(module, spaces, seen, lambda: 0, device=device)
        states = actor.memory.of(0) if actor.memory is not None else {}
        noise = np.zeros((rows, module.noise_size), np.float32) if settings.explore else None
        columns = actor(noise, None, 0, in_step=True) if isinstance(actor, ActionChunks) else actor(noise)
        kinds = {name: (column.dtype, column.shape[1:]) for name, column in columns.items()}
        if maps:
            kinds = {name: kind for name, kind in kinds.items() if name.split("/", 1)[0] != "actions_for_env"}
            sent = leaves(env_spaces.action, "actions_for_env")
            kinds |= {name: (column_dtype(leaf), leaf_shape(leaf)) for name, leaf in sent}
        kinds |= {STATE_IN + name: (row.dtype, row.shape) for name, row in states.items()}
        kinds[OFF_POLICY] = np.dtype(np.bool_), ()
        looks_back = settings.episode_lookback_horizon > 0
        own = {name: kind for name, kind in kinds.items() if not belongs_to_space(name) and name not in SAMPLERS_OWN}
        return cls(own, looks_back)

    def check(self, batch: ChunkBatch) -> None:
        """Raise `DecodeError` for a batch of another policy or with other settings.

        `BatchReader` checks the leaves of the spaces, and that lookback columns match the columns they look back on.
        """
        if not batch.steps:
            return
        own: dict[str, Kind] = {}
        looks_back = False
        for name, column in batch.arrays.items():
            if name.startswith(LOOKBACK):
                looks_back = True
            elif not belongs_to_space(name) and name not in SAMPLERS_OWN:
                own[name] = column.dtype, column.shape[1:]
        for name in sorted(own.keys() | self.kinds.keys()):
            if own.get(name) != self.kinds.get(name):
                seen, wanted = _in_words(own.get(name)), _in_words(self.kinds.get(name))
                raise DecodeError(
                    "bad_column",
                    f"column {name!r:.80} is {seen}, and {wanted} in chunks of this policy and its settings",
                )
        if looks_back is not self.looks_back:
            words = ["do not look back", "look back"]
            raise DecodeError(
                "bad_column",
                f"the chunks {words[looks_back]}, and this runner's {words[self.looks_back]}: give both the same "
                "episode_lookback_horizon",
            )


def _in_words(kind: Kind | None) -> str:
    return "absent" if kind is None else f"{kind[0]} of {kind[1]}"

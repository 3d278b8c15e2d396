"""The modules of a fleet as the learner knows them: the spaces of each, and readers of its batches."""

from __future__ import annotations

from typing import Any

from headrace.schemas.basics.bounds import Version
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.batch_reader import BatchReader, UnreadBatch
from headrace.schemas.chunks.module_spaces import module_spaces_from_json
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import DecodeError, WhichModuleError


class ModuleReaders:
    """Readers by module. Empty until `learn` gets the modules, which are the same for a fleet's whole life."""

    def __init__(self) -> None:
        self.spaces: dict[str, Spaces] = {}
        """Spaces of each module, by module id."""
        self._readers: dict[str, BatchReader] = {}

    def learn(self, told: dict[str, Any]) -> None:
        """Take the spaces that the broker passed on from the first worker. Raises `DecodeError`."""
        if not self.spaces:
            self.spaces = module_spaces_from_json(told)

    def spaces_of(self, module_id: str | None) -> Spaces:
        """Return the spaces of a module, or, for None, of the only one there is. Raises `WhichModuleError`."""
        if module_id is None and len(self.spaces) == 1:
            return next(iter(self.spaces.values()))
        if module_id is None or module_id not in self.spaces:
            raise WhichModuleError(module_id, self.spaces)
        return self.spaces[module_id]

    def read(self, unread: UnreadBatch, newest: Version = (0, 0)) -> ChunkBatch:
        """Read a batch of one module. `newest` is the version from which its lag counts.

        Raises `DecodeError` for an unknown module, or a batch that contradicts itself.
        """
        modules = unread.header.modules
        module_id = modules[0] if len(modules) == 1 else ""
        if module_id not in self.spaces:
            known = sorted(self.spaces)
            raise DecodeError("bad_batch_header", f"a batch of {modules!r:.200}; the modules are {known!r:.200}")
        if module_id not in self._readers:
            own = self.spaces[module_id]
            self._readers[module_id] = BatchReader(own.observation, own.action)
        return self._readers[module_id].read(unread, newest)

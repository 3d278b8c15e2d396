"""What all parts of the configuration are: values that do not change once they were checked."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigSection(BaseModel):
    """A part of the configuration; parts are handed to those who use them, never the whole tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

"""The base class of all sections of the configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigSection(BaseModel):
    """A frozen part of the configuration, checked when built. Code gets the parts it uses, never the whole tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

"""Encoders from observations of any space to one row of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from headrace.schemas.chunks.spaces import Box, Leaf, Space, leaf_values, leaves, nest
from headrace.workers.connectors.pieces import as_tensor, one_hot_size
from headrace.workers.modules.layers import conv, linear

_CHANNELS = (16, 32, 32)
_IMAGE_FEATURES = 256
_IMAGE_RANK = 3


class Encoder(nn.Module):
    """Features (rows, size) of all leaves side by side: images through a CNN, integers one-hot, the rest flat."""

    def __init__(self, space: Space, generator: torch.Generator) -> None:
        super().__init__()
        self._space = space
        self._parts = nn.ModuleList(_part(leaf, generator) for _, leaf in leaves(space, "obs"))
        self.size = sum(part.size for part in self._parts)  # type: ignore[misc]

    def forward(self, obs: Any) -> torch.Tensor:
        """Return the features of `obs`: a tensor (rows, ...), or nested as the space is."""
        features = [part(value) for part, value in zip(self._parts, leaf_values(self._space, obs), strict=True)]
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def nest(self, columns: Mapping[str, torch.Tensor]) -> Any:
        """Return observation columns in the nesting that `forward` takes."""
        return nest(self._space, columns, "obs")  # type: ignore[arg-type]


def is_plain_vector(space: Space) -> bool:
    """Return whether the observation, as float32, is its own features: one vector of floats."""
    return isinstance(space, Box) and len(space.shape) == 1 and space.dtype in ("<f4", "<f8")


class _Vector(nn.Module):
    """Integers of Discrete kinds one-hot, all else flat."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self._leaf, self.size = leaf, one_hot_size(leaf)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return as_tensor(self._leaf, value)


class _Image(nn.Module):
    """CNN for images of rank 3, channels first or last, with bytes scaled to [0, 1]."""

    def __init__(self, leaf: Box, generator: torch.Generator) -> None:
        super().__init__()
        self._channels_last = leaf.shape[2] <= leaf.shape[0]
        height, width, channels = leaf.shape if self._channels_last else (*leaf.shape[1:], leaf.shape[0])
        self._scale = 1 / 255 if leaf.dtype == "|u1" else 1.0
        layers: list[nn.Module] = []
        for out in _CHANNELS:
            layers += [conv(channels, out, generator), nn.ReLU()]
            height, width, channels = (height + 1) // 2, (width + 1) // 2, out
        flat = height * width * channels
        self._layers = nn.Sequential(*layers, nn.Flatten(), linear(flat, _IMAGE_FEATURES, 2**0.5, generator), nn.ReLU())
        self.size = _IMAGE_FEATURES

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        image = value.permute(0, 3, 1, 2) if self._channels_last else value
        features: torch.Tensor = self._layers((image.float() * self._scale).to(next(self._layers.parameters()).dtype))
        return features


def _part(leaf: Leaf, generator: torch.Generator) -> nn.Module:
    if isinstance(leaf, Box) and len(leaf.shape) == _IMAGE_RANK:
        return _Image(leaf, generator)
    return _Vector(leaf)

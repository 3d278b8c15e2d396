"""The interface that the reference learner needs of a policy module, and functions that build one from the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

from torch import Tensor, nn

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import HeadraceError, ModuleError, words_of
from headrace.schemas.settings.config import ModuleSection
from headrace.schemas.settings.plugins import load_object


class TrainableModule(Protocol):
    """A torch module with three more methods. Observations and actions are tensors, in the nesting of their space.

    A module that also has `initial_state()` is recurrent: its `forward_train` gets whole chunks, as
    `minibatches.ChunkMinibatches` describes.
    """

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the trainable parameters."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return all tensors by name."""

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> Any:
        """Load all tensors by name."""

    def forward_train(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Map {"obs": ...} to {"action_dist_inputs": (rows, ...), "values": (rows,)}, with gradients."""

    def logp(self, dist_inputs: Tensor, actions: Any) -> Tensor:
        """Return the log-probability (rows,) of `actions`."""

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        """Return the entropy (rows,) in nats."""


def build_module(section: ModuleSection, spaces: Spaces, where: str = "module") -> TrainableModule:
    """Build the module that workers build by the same name. `where` is the setting that names it.

    Raises `ConfigError` for a bad import path, `ModuleError` for any other failure.
    """
    module = build_frozen_module(section, spaces, where)
    missing = [name for name in ("forward_train", "logp", "entropy") if not hasattr(module, name)]
    if missing:
        raise ModuleError(
            f"module {section.build!r} has no {', '.join(missing)}; the reference learner calls "
            'forward_train({"obs": ...}), logp(dist_inputs, actions) and entropy(dist_inputs)'
        )
    if getattr(module, "action_chunk_size", 1) != 1:
        raise ModuleError(
            f"module {section.build!r} has an action_chunk_size, and the reference learner computes log-probs from the "
            "observation of each step; leave it out, or train with a learner of your own: --set learner.enabled=false"
        )
    elsewhere = {str(tensor.device) for tensor in module.state_dict().values()} - {"cpu"}
    if elsewhere:
        raise ModuleError(
            f"module {section.build!r} is on {min(elsewhere)}, and the reference learner trains on the CPU; build it "
            "there, or train it on a device by a learner of your own"
        )
    return cast(TrainableModule, module)


def build_frozen_module(section: ModuleSection, spaces: Spaces, where: str = "module") -> nn.Module:
    """Build a module for inference only, which needs none of the methods for training."""
    build = load_object(section.build, f"{where}.build")
    try:
        module = build(spaces, **section.config)
    except HeadraceError:
        raise
    except BaseException as error:
        raise_stop(error)
        raise ModuleError(
            f"module {section.build!r} could not be built ({words_of(error)}); it is called as "
            f"build(spaces, **config) with {where}.config = {section.config!r:.200}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModuleError(f"module {section.build!r} returned a {type(module).__name__}; it must be a torch.nn.Module")
    return module


def check_answer(answer: Mapping[str, Tensor], rows: int) -> tuple[Tensor, Tensor]:
    """Return (action_dist_inputs, values) of a `forward_train` over `rows` observations. Raises `ModuleError`."""
    missing = [name for name in ("action_dist_inputs", "values") if name not in answer]
    if missing:
        raise ModuleError(f"forward_train returned {sorted(answer)}, without {' and '.join(missing)}")
    dist_inputs, values = answer["action_dist_inputs"], answer["values"]
    if len(dist_inputs) != rows or values.shape != (rows,):
        raise ModuleError(
            f"forward_train returned action_dist_inputs of shape {tuple(dist_inputs.shape)} and values of shape "
            f"{tuple(values.shape)} for {rows} observations; it must be one row each, and values one number a row"
        )
    return dist_inputs, values

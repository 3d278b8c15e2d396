"""The forward pass of a module on a device other than the CPU: one copy there, and one back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.basics.tensor_array import tensor_of
from headrace.schemas.chunks.spaces import Space, nest
from headrace.workers.devices.device import Block, Device, each_elsewhere
from headrace.workers.devices.device_memory import DeviceMemory
from headrace.workers.policy.module_protocol import has_newest


class DevicePass:
    """Passes of `module`, which it moves to `device`, for observations in `columns`, read again at each pass.

        columns, noise, which lanes begin and act ── one copy ──▶ forward pass ── one copy ──▶ answer

    State stays on the device. A module that has `forward_outputs` makes its choice here, of outputs that came back.
    """

    def __init__(
        self,
        module: Any,
        device: Device,
        space: Space,
        columns: Mapping[str, NDArray[Any]],
        memory: DeviceMemory | None,
        lanes: NDArray[np.intp] | None,
    ) -> None:
        module.to(device.place)
        self._module, self._device, self._memory = module, device, memory
        self._own_lanes = lanes
        self._lanes = None if lanes is None else torch.from_numpy(lanes).to(device.place)
        self._chooses_here = has_newest(module, "forward_outputs", "forward_exploration", "forward_inference")
        self._columns = [torch.from_numpy(column) for column in columns.values()]
        kinds = [(column.dtype, tuple(column.shape)) for column in self._columns]
        if not self._chooses_here:
            kinds.append((torch.float32, (len(self._columns[0]), module.noise_size)))
        if memory is not None:
            kinds += [(torch.bool, (memory.width,))] * 2
        self._sent, self._back = Block(device, kinds), Block(device, [])
        there = dict(zip(columns, self._sent.there, strict=False))
        self._obs = nest(space, there, "obs")  # type: ignore[arg-type]

    def __call__(
        self, noise: NDArray[np.float32] | None, acting: NDArray[np.intp] | None, count_steps: Callable[[], int]
    ) -> Any:
        """Return the module's answer, with all tensors but its "state_out" on the CPU."""
        sent, batch = self._sent, {"obs": self._obs}
        for here, column in zip(sent.here, self._columns, strict=False):
            here.copy_(column)
        if not self._chooses_here and noise is not None:
            sent.here[len(self._columns)].copy_(tensor_of(noise))
            batch |= {"noise": sent.there[len(self._columns)], "t": count_steps()}
        if self._memory is not None:
            own = self._own_lanes if acting is None else acting
            self._memory.mark(sent.here[-2].numpy(), sent.here[-1].numpy(), own)
        with torch.inference_mode():
            sent.send()
            if self._memory is not None:
                batch["state_in"] = self._memory.tensors(sent.there[-2], self._lanes)
            if self._chooses_here:
                answer = self._module.forward_outputs(batch)
            elif noise is None:
                answer = self._module.forward_inference(batch)
            else:
                answer = self._module.forward_exploration(batch)
            if not isinstance(answer, dict):
                return answer
            answer, elsewhere = dict(answer), list[torch.Tensor]()
            state_out = answer.pop("state_out", None)
            each_elsewhere(answer, elsewhere.append)
            fetched, self._back = self._device.fetch(elsewhere, self._back)
            fetched.reverse()
            answer = each_elsewhere(answer, lambda _: fetched.pop())
        if self._chooses_here:
            answer = self._module.act_on(answer, noise)
        return answer if state_out is None else {**answer, "state_out": state_out}

    def keep(self, state_out: Any, acting: NDArray[np.intp] | None) -> None:
        """Keep the "state_out" of the last pass for the lanes `acting` (None: all). Raises `ModuleError`."""
        if self._memory is not None:
            own = self._own_lanes if acting is None else acting
            self._memory.take(state_out, self._sent.there[-1], own, self._lanes)

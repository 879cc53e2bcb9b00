"""The allocation program of one step, in the order in which a real forward pass asks for memory."""

from __future__ import annotations

from collections.abc import Iterable

from hbmtwin.allocators.contract import DeviceAllocator, KVPolicy
from hbmtwin.allocators.records import Tag


class Forward:
    """Loads the weights once and lets the KV cache grow layer by layer.

    Activations are not allocated step by step here: their estimated peak is set aside when the weights are loaded,
    and held for the whole run (``memory.activations = "none"``).
    """

    def __init__(self, general: DeviceAllocator, num_layers: int) -> None:
        self.general = general
        self.num_layers = num_layers

    def load(self, tensors: Iterable[tuple[str, int]], activation_bytes: int) -> None:
        """Allocate the weights, tensor by tensor, and the activation reserve. Raise OutOfMemory."""
        for _, size in tensors:
            self.general.malloc(size, tag=Tag.WEIGHT)
        if activation_bytes:
            self.general.malloc(activation_bytes, tag=Tag.ACTIVATION)

    def step(self, kv: KVPolicy) -> None:
        """Carry out what this step's reservations need. Raise OutOfMemory."""
        for layer in range(self.num_layers):
            kv.grow_layer(layer)
        kv.end_step()

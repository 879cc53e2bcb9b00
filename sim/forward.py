"""The allocation program of one step, carried out in the order in which a real forward pass asks for memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from hbmtwin.allocators.contract import DeviceAllocator, KVPolicy, WorkspaceAllocator
from hbmtwin.allocators.pool_policy import PoolPolicy
from hbmtwin.allocators.records import Tag, Work
from hbmtwin.allocators.stats import Counters
from hbmtwin.kernels.activations import ActivationModel, Instruction
from hbmtwin.kernels.records import BatchShape

Activations = Literal["none", "peak", "per_layer"]


class Forward:
    """Loads the weights once, and in each step takes activations, lets the KV cache grow layer by layer, and samples.

    - ``none``: the estimated peak of all activations is set aside when the weights are loaded, and held for the run;
    - ``peak``: one tensor a step, as large as its activations ever are at once;
    - ``per_layer``: every tensor of :mod:`hbmtwin.kernels.activations`, in program order.

    *workspace* is the allocator that gives operators their workspace where that is not *general* itself
    (``TASK_QUEUE_ENABLE=2``).
    """

    def __init__(
        self,
        general: DeviceAllocator,
        num_layers: int,
        activations: Activations = "none",
        model: ActivationModel | None = None,
        workspace: WorkspaceAllocator | None = None,
    ) -> None:
        self.general = general
        self.num_layers = num_layers
        """Those that keep KV of every token."""
        self.activations = activations
        self.repeatable = activations == "none" or (
            activations == "peak" and model is not None and not model.grows_with_context
        )
        """Whether equal steps ask for equal sizes, so that they may be taken at once."""
        self._model = model
        self._workspace = workspace
        self._live: dict[str, int] = {}
        self._before: Counters | None = None

    def load(self, tensors: Iterable[tuple[str, int]], activation_bytes: int) -> None:
        """Allocate the weights, tensor by tensor, and with ``none`` the activation reserve. Raise OutOfMemory."""
        for _, size in tensors:
            self.general.malloc(size, tag=Tag.WEIGHT)
        if self.activations == "none" and activation_bytes:
            self.general.malloc(activation_bytes, tag=Tag.ACTIVATION)

    def allocates(self, kv: KVPolicy) -> bool:
        """Whether a step may ask an allocator for anything."""
        return self.activations != "none" or not isinstance(kv, PoolPolicy)

    def step(self, kv: KVPolicy, batch: BatchShape) -> None:
        """Carry out one step. Raise OutOfMemory; what the step had taken until then stays, until :meth:`abort`."""
        if self.activations == "none":
            if not isinstance(kv, PoolPolicy):  # a pool grows in no layer, and this is every step of a run
                for layer in range(self.num_layers):
                    kv.grow_layer(layer)
        elif self.activations == "peak":
            assert self._model is not None
            self._before = self.general.counters()
            self._live["peak"] = self.general.malloc(self._model.program(batch).peak_bytes, tag=Tag.ACTIVATION)
            for layer in range(self.num_layers):
                kv.grow_layer(layer)
            self.abort()
        else:
            assert self._model is not None
            program = self._model.program(batch)
            kv_layers = iter(range(self.num_layers))
            for instructions in (program.before, *program.layers, program.after):
                self._run(instructions, kv, kv_layers)
        kv.end_step()

    def is_steady(self, work: Work) -> bool:
        """Whether further steps equal to the last, which did *work*, would do the same.

        A tensor that is taken from cached memory, without a driver call, and given back leaves every block as it was:
        its neighbours merge again. So no work, and equal counts of blocks, segments and split pieces, say that the
        allocator is as it was found.
        """
        if self._before is None:
            return True
        return work == Work() and self.general.counters().current == self._before.current

    def repeat(self, steps: int) -> None:
        """Count the last step's activations *steps* times more: once a step, and all of them together. O(1).

        Only where :attr:`repeatable` and :attr:`is_steady` hold, and the allocator did no work.
        """
        if self._before is not None and steps:
            self.general.repeat(self._before, steps)

    @property
    def repeated_operations(self) -> int:
        """Operations of each step that :meth:`repeat` counts."""
        return 0 if self._before is None else 2

    def abort(self) -> None:
        """Give back what the step has taken and not given back yet."""
        while self._live:
            self.general.free(self._live.popitem()[1])

    def _run(self, instructions: Iterable[Instruction], kv: KVPolicy, kv_layers: Iterator[int]) -> None:
        live, general = self._live, self.general
        for verb, name, size in instructions:
            if verb == "malloc":
                live[name] = general.malloc(size, tag=Tag.ACTIVATION)
            elif verb == "free":
                general.free(live.pop(name))
            elif verb == "grow":
                kv.grow_layer(next(kv_layers))
            elif self._workspace is not None:
                self._workspace.workspace(size)
            else:
                general.free(general.malloc(size, tag=Tag.WORKSPACE))

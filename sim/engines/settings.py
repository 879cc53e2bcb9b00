"""What an engine takes where the user says nothing: some defaults depend on the device, some on other settings.

::

    max_model_len 35,000    V0 of vLLM: chunked prefill turns itself on above 32,768    2,048 tokens a batch
    max_model_len 29,000    prompts are computed whole                                  29,000 tokens a batch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from hbmtwin.kernels.records import DeviceSpec, ModelShape

if TYPE_CHECKING:
    from hbmtwin.sim.engines.rules import EngineRules

WITHOUT_END = 1 << 62

Value = TypeVar("Value")


class EngineArgs(NamedTuple):
    """What the user said, in vLLM's names; None: nothing."""

    gpu_memory_utilization: float | None = None
    """Or what the engine has in its place: ``mem_fraction_static``, ``free_gpu_memory_fraction`` ..."""
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    enforce_eager: bool | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


class BatchRule(NamedTuple):
    """How the batch that is profiled follows from ``max_model_len`` where prompts may be computed whole."""

    least: int
    whole_up_to: int = WITHOUT_END
    """The longest ``max_model_len`` with which prompts are computed whole."""
    chunk_tokens: int = 0
    """Of a batch above that."""

    def tokens(self, max_model_len: int) -> int:
        """``max_num_batched_tokens`` of a server with that length."""
        return self.chunk_tokens if max_model_len > self.whole_up_to else max(max_model_len, self.least)


class Settings(NamedTuple):
    """All settings of a start that its memory depends on."""

    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    enforce_eager: bool
    batch_rule: BatchRule | None = None
    """Set where ``max_num_batched_tokens`` was not given and follows from ``max_model_len``."""


def settings_of(rules: EngineRules, model: ModelShape, device: DeviceSpec, args: EngineArgs) -> Settings:
    """*args*, filled with the defaults of that engine and version for this model and device."""
    return rules.defaults(rules, model, device, args)


def or_else(given: Value | None, default: Value) -> Value:
    """*given*, or *default* where nothing is."""
    return default if given is None else given

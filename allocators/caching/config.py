"""What a caching allocator is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from hbmtwin.allocators.caching.conf import AllocatorConf
from hbmtwin.allocators.caching.releases import ReleaseRules, release_rules
from hbmtwin.allocators.caching.sizes import Flavour


@dataclass(frozen=True, slots=True)
class CachingConfig:
    """Settings of :class:`~hbmtwin.allocators.caching.allocator.CachingAllocator`."""

    flavour: Flavour = "torch_npu"
    release: str | None = None
    """Version of the package; None is the one compared with the real binary: torch_npu 2.13.0, torch 2.11.0."""
    limit_bytes: int | None = None
    """Cap on what is taken from the driver, as ``set_per_process_memory_fraction`` sets; None is no cap."""
    alloc_conf: str = ""
    """Text of ``PYTORCH_NPU_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF``."""
    soc: str = "Ascend910B2"
    """Of torch_npu: the chip, which decides on the pad."""
    cann: str = "8.5.0"
    """Of torch_npu: the CANN version, which decides on the pad and on ``page_size:1g``."""
    hccl_zero_copy: bool = False
    """Of torch_npu: ``TORCH_HCCL_ZERO_COPY=1``, which shortens the address space of expandable segments."""
    no_caching: bool = False
    """``PYTORCH_NO_NPU_MEMORY_CACHING=1`` or ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``: each tensor is a driver call."""
    research_after_sync: bool = False
    """Search the cache once more after the last events were waited for, as the fix of pytorch#189504 does."""

    def __post_init__(self) -> None:
        if self.flavour not in get_args(Flavour):
            raise ValueError(f"flavour must be one of {', '.join(get_args(Flavour))}, not {self.flavour!r}")
        if self.limit_bytes is not None and self.limit_bytes < 0:
            raise ValueError(f"limit_bytes must not be negative, but is {self.limit_bytes}")
        self.read_alloc_conf()

    def rules(self) -> ReleaseRules:
        """The rules of this flavour and release. Raise ValueError for a release that is not modelled."""
        return release_rules(self.flavour, self.release, self.soc, self.cann)

    def read_alloc_conf(self) -> AllocatorConf:
        """The settings in force at the start. Raise ConfError as torch does."""
        rules = self.rules()
        conf = AllocatorConf(
            self.flavour,
            absent_keys=rules.absent_keys,
            split_size_exclusive=rules.split_size_exclusive,
            page_size_1g_supported=rules.page_size_1g_supported,
        )
        conf.parse(self.alloc_conf)
        return conf

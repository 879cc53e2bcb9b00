"""Which family a device is of, and which op does what on it where nobody says otherwise.

::

    get_device_name()                   family   prefill   decode   paged   write
    Ascend910B1 .. B4-1, B2C            a2       FIA       FIA      FIA     scatter
    Ascend910_93xx: one die of a 910C   a3       FIA       FIA      FIA     scatter
    Ascend310P1 .. P7                   310p     PFA       IFA      IFA     reshape_and_cache
    Ascend910A, ProA, ProB, 910B        910a     none is documented

Source: table of ops of op-plugin 517f2e7d, and what vllm-ascend 182b75e calls.
"""

from __future__ import annotations

from typing import NamedTuple

from hbmtwin.kernels.attention.backends import BackendUnavailable
from hbmtwin.kernels.attention.npu_310p import IFA, PFA
from hbmtwin.kernels.attention.npu_cache import RESHAPE_AND_CACHE, SCATTER
from hbmtwin.kernels.attention.npu_fia import FIA


class NpuChoice(NamedTuple):
    """The op of each use, by its name in torch_npu."""

    prefill: str
    decode: str
    paged_prefill: str
    paged_decode: str
    write: str


def family_of(soc: str) -> str:
    """The family in the capability table of a device that torch_npu calls *soc*. Raises BackendUnavailable."""
    if soc.startswith("Ascend910_93"):
        return "a3"
    if soc.startswith("Ascend910B") and soc[10:11].isdigit():
        return "a2"
    if soc.startswith("Ascend310P"):
        return "310p"
    if soc in ("Ascend910A", "Ascend910ProA", "Ascend910PremiumA", "Ascend910ProB", "Ascend910B"):
        return "910a"
    raise BackendUnavailable(f"npu: no attention op is known for {soc!r}; known are Atlas A2, A3 and Ascend 310P")


def choice_for(family: str) -> NpuChoice:
    """What is called on *family* where nobody says otherwise. Raises BackendUnavailable where no op is documented."""
    if family in ("a2", "a3"):
        return NpuChoice(FIA, FIA, FIA, FIA, SCATTER)
    if family == "310p":
        return NpuChoice(PFA, IFA, PFA, IFA, RESHAPE_AND_CACHE)
    raise BackendUnavailable(f"npu: no fused attention op is documented for {family}; use Atlas A2, A3 or Ascend 310P")

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hbmtwin.validation.emulated import EmulatedNpu, EmulatorUnavailable


@pytest.fixture(scope="session")
def npu() -> Iterator[EmulatedNpu]:
    """The real torch_npu, imported once: a device of 1 GiB with torch_npu's defaults."""
    with ExitStack() as opened:
        try:
            emulated = opened.enter_context(EmulatedNpu(capacity_bytes=1 << 30))
        except EmulatorUnavailable as missing:
            pytest.skip(str(missing))
        yield emulated

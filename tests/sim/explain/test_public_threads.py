"""Figures that people published with their failures, in the allocator's form.

What a thread did not tell (totals and allocated bytes of kaito and Diffuman4D) is filled so that the books add up.
"""

from __future__ import annotations

import pytest

from hbmtwin.allocators.oom import Cause

from .test_judge_pastes import judged

NPU = (
    "NPU out of memory. Tried to allocate {} (NPU 0; {} total capacity; {} already allocated; {} current active; {} "
    "free; {} reserved in total by PyTorch)"
)
CUDA = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} of which {} is free. Of the allocated "
    "memory {} is allocated by PyTorch, and {} is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("thread", "asked", "total", "allocated", "free", "reserved", "cause"),
    [
        ("TouchNet#100", "5.03 GiB", "60.96 GiB", "49.47 GiB", "1.32 GiB", "57.55 GiB", Cause.EXTERNAL_FRAGMENTATION),
        (
            "vllm-ascend#1617",
            "4.50 GiB",
            "60.96 GiB",
            "52.87 GiB",
            "2.77 GiB",
            "56.89 GiB",
            Cause.EXTERNAL_FRAGMENTATION,
        ),
        ("sglang#29838", "72.00 MiB", "61.27 GiB", "56.05 GiB", "5.04 MiB", "58.39 GiB", Cause.EXTERNAL_FRAGMENTATION),
        (
            "sglang#15453",
            "226.00 MiB",
            "60.96 GiB",
            "58.13 GiB",
            "97.00 MiB",
            "58.42 GiB",
            Cause.EXTERNAL_FRAGMENTATION,
        ),
        (
            "vllm-ascend#19",
            "22.00 MiB",
            "60.97 GiB",
            "10.24 GiB",
            "19.52 MiB",
            "10.65 GiB",
            Cause.EXTERNAL_FRAGMENTATION,
        ),
    ],
)
def test_threads_of_npus(
    thread: str, asked: str, total: str, allocated: str, free: str, reserved: str, cause: Cause
) -> None:
    (judgement,) = judged(NPU.format(asked, total, allocated, allocated, free, reserved))
    assert judgement.cause is cause, thread


def test_a_thread_whose_50_gib_belonged_to_somebody_else_gets_that_advice_too() -> None:
    """vllm-ascend#19 is in pieces by the letter, 0.41 GiB for 22 MiB, and its real trouble is who holds the rest."""
    text = NPU.format("22.00 MiB", "60.97 GiB", "10.24 GiB", "10.24 GiB", "19.52 MiB", "10.65 GiB")
    (judgement,) = judged(text)
    helps = "\n".join(each.text() for each in judgement.helps)
    assert "see with npu-smi info which process holds about 44.79 GiB on this device" in helps
    assert "fragmentation on a device that is full anyway" in judgement.said.text()


@pytest.mark.parametrize(
    ("thread", "asked", "total", "free", "allocated", "unallocated", "cause"),
    [
        ("CADS#4", "22.78 GiB", "31.47 GiB", "12.73 GiB", "9.08 GiB", "9.35 GiB", Cause.SHORTAGE),
        ("kaito#976", "546.00 MiB", "14.57 GiB", "514.00 MiB", "12.90 GiB", "736.86 MiB", Cause.EXTERNAL_FRAGMENTATION),
        ("Diffuman4D#20", "960.00 MiB", "23.99 GiB", "15.52 GiB", "7.01 GiB", "1.20 GiB", Cause.ALLOCATOR_RULE),
        ("dots.ocr#196", "74.16 GiB", "44.40 GiB", "29.89 GiB", "13.44 GiB", "738.96 MiB", Cause.NEVER_FITS),
    ],
)
def test_threads_of_gpus(
    thread: str, asked: str, total: str, free: str, allocated: str, unallocated: str, cause: Cause
) -> None:
    (judgement,) = judged(CUDA.format(asked, total, free, allocated, unallocated))
    assert judgement.cause is cause, thread


@pytest.mark.parametrize(
    ("text", "cause", "said", "first_help"),
    [
        (
            NPU.format("18.00 MiB", "60.97 GiB", "1.70 GiB", "1.70 GiB", "21.00 MiB", "1.82 GiB"),
            Cause.EXTERNAL_FRAGMENTATION,
            "mostly with what others hold: about 53.62 GiB of 60.97 GiB",
            "see with npu-smi info which process holds about 53.62 GiB",
        ),
        (
            CUDA.format("32.00 MiB", "4.00 GiB", "41.50 MiB", "3.48 GiB", "1.90 MiB"),
            Cause.SHORTAGE,
            "this process itself has filled the device",
            "if this came after the KV cache was placed",
        ),
    ],
)
def test_the_last_megabytes_of_a_driver_are_no_room(text: str, cause: Cause, said: str, first_help: str) -> None:
    """MinerU's and MyGirlGPT's threads: a little more was free than was asked for, on a device that was full. That no
    rule of the allocator refused it shows in what helped there: another device, a smaller model."""
    (judgement,) = judged(text)
    assert judgement.cause is cause
    assert said in judgement.said.text()
    assert judgement.helps[0].text().startswith(first_help)
    books = "\n".join(each.text() for each in judgement.arithmetic)
    assert "of a full device it keeps up to 48.00 MiB for itself (estimated)" in books
    assert "0 bytes free + " in books


def test_more_than_the_last_megabytes_is_room() -> None:
    (judgement,) = judged(CUDA.format("32.00 MiB", "4.00 GiB", "49.00 MiB", "3.48 GiB", "1.90 MiB"))
    assert judgement.cause is Cause.ALLOCATOR_RULE

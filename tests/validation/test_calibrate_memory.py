"""What a boot log says was measured becomes the memory of a profile; what it does not say stays away."""

from __future__ import annotations

from pathlib import Path

from hbmtwin.validation.calibrate.memory import memory_of_log

GIB = 1 << 30
BOOT = (
    "INFO 08-21 10:00:00 [gpu_worker.py:298] Memory profiling takes 8.25 seconds. the current vLLM instance can use "
    "total_gpu_memory (79.19GiB) x gpu_memory_utilization (0.95) = 75.23GiB\n"
    "model weights take 14.99GiB; non_torch_memory takes 0.25GiB; PyTorch activation peak memory takes 1.89GiB; the "
    "rest of the memory reserved for KV Cache is 58.10GiB.\n"
    "INFO 08-21 10:00:30 [gpu_model_runner.py:2100] Graph capturing finished in 21 secs, took 0.91 GiB\n"
)


def test_the_terms_of_a_boot_log(tmp_path: Path) -> None:
    (tmp_path / "boot.log").write_text(BOOT)
    told = {name: round(size / GIB, 2) for name, size in memory_of_log(tmp_path / "boot.log").items()}
    assert told == {"activation_bytes": 1.89, "non_torch_bytes": 0.25, "graph_bytes": 0.91}


def test_what_is_not_told_is_absent(tmp_path: Path) -> None:
    (tmp_path / "boot.log").write_text(BOOT.splitlines()[-1])
    assert list(memory_of_log(tmp_path / "boot.log")) == ["graph_bytes"]
    (tmp_path / "none.log").write_bytes(b"\xff\x00 nothing \n")
    assert memory_of_log(tmp_path / "none.log") == {}

from __future__ import annotations

import json

import pytest

from hbmtwin.sim.catalog import device
from hbmtwin.sim.explain.explaining import explain

from .engine_pastes import HEALTHY, PASTES, Healthy, Paste


def _has(sentences: list[str], part: str) -> bool:
    return any(part in sentence for sentence in sentences)


@pytest.mark.parametrize("paste", PASTES, ids=lambda paste: paste.name)
def test_what_failed_is_told_with_its_cause_its_books_and_its_cures(paste: Paste) -> None:
    told = explain(paste.text)
    first = told.judgements[0]
    assert told.understood
    assert (first.cause, first.when) == (paste.cause, paste.when)
    assert paste.said in str(told.verdict)
    assert told.server.engine == paste.engine
    assert {name: told.server.numbers.get(name) for name in paste.numbers} == paste.numbers
    for part in paste.helps:
        assert _has([str(said) for said in first.helps], part), part
    for part in paste.useless:
        assert _has([str(said) for said in first.does_not_help], part), part
    for part in paste.arithmetic:
        assert _has([str(said) for said in first.arithmetic], part), part


@pytest.mark.parametrize("paste", HEALTHY, ids=lambda paste: paste.name)
def test_what_did_not_fail_is_told_with_its_numbers(paste: Healthy) -> None:
    told = explain(paste.text)
    assert told.understood
    assert told.judgements == ()
    assert told.server.engine == paste.engine
    assert {name: told.server.numbers.get(name) for name in paste.numbers} == paste.numbers
    for part in paste.says:
        assert _has([str(said) for said in told.says], part), part
    for part in paste.books:
        assert _has([str(said) for said in told.arithmetic], part), part


@pytest.mark.parametrize("paste", [*PASTES, *HEALTHY], ids=lambda paste: paste.name)
def test_both_languages_have_the_same_numbers(paste: Paste | Healthy) -> None:
    told = explain(paste.text)
    english, chinese = told.to_dict("en"), told.to_dict("zh")
    assert english["numbers"] == chinese["numbers"]
    assert english["findings"] == chinese["findings"]
    for one, other in zip(english["judgements"], chinese["judgements"], strict=True):
        assert one["facts"] == other["facts"]
        assert one["said"] != other["said"]
        assert len(one["helps"]) == len(other["helps"])
    assert json.loads(json.dumps(english)) == english


def test_the_facts_that_classify_was_asked_are_in_the_record() -> None:
    told = explain(PASTES[0].text)
    facts = told.to_dict()["judgements"][0]["facts"]
    assert facts["need_bytes"] == 8 << 30
    assert facts["limit_bytes"] == (8 << 30) * 5 // 16
    assert facts["fixed_pool"] is True


def test_a_run_that_only_passes_on_a_failure_says_so() -> None:
    told = explain(
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
        "{}\n"
    )
    assert told.understood
    assert "paste what stands above it" in str(told.verdict)


def test_text_that_says_nothing_of_memory_is_told_with_what_it_does_say() -> None:
    told = explain("make: *** No rule\nzmq.error.ZMQError: Address already in use\nValueError: bad port\n")
    assert not told.understood
    assert "in these 3 lines" in str(told.verdict)
    left = [str(said) for said in told.not_read]
    assert _has(left, "(line 2): zmq.error.ZMQError: Address already in use")
    assert _has(left, "(line 3): ValueError: bad port")
    assert _has(left, "known are: ")
    assert (told.scenario, told.fit_command) == ("", "")


@pytest.mark.parametrize("text", ["", "\n\n", b"", b"\xff\xfe"])
def test_no_text_is_told(text: str | bytes) -> None:
    told = explain(text)
    assert not told.understood
    assert str(told.verdict) == "there is no text"


def test_the_rank_with_the_least_room_decides_and_all_are_counted() -> None:
    lines = [
        f"(Worker_TP{rank} pid={rank}) INFO 01-02 03:04:05 [gpu_worker.py:298] Available KV cache memory: {size} GiB"
        for rank, size in enumerate(("5.25", "5.00", "5.50", "5.25"))
    ]
    told = explain("\n".join(lines))
    assert told.server.rank == "TP1"
    assert told.server.numbers["available_kv_bytes"] == 5 << 30
    assert told.server.numbers["tensor_parallel_size"] == 4
    assert "(line 2, TP1; 4 ranks say so of themselves, from 5.00 GiB to 5.50 GiB)" in str(told.says[-1])


def test_a_failure_of_the_allocator_beside_an_engines_error_without_figures_comes_first() -> None:
    told = explain(
        '  File "/x/gpu_model_runner.py", line 10, in capture_model\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 900.00 MiB. GPU 0 has a total capacity of 80.00 "
        "GiB of which 500.00 MiB is free. Including non-PyTorch memory, this process has 79.51 GiB memory in use. Of "
        "the allocated memory 76.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but "
        "unallocated.\n"
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests.\n"
    )
    assert [judgement.line for judgement in told.judgements] == [2, 3]
    assert told.direction is not None
    assert "Lowering it is the cure" in str(told.direction)


def test_the_published_log_of_236416_tokens_gets_its_books() -> None:
    """11,381,826,560 bytes at 48,128 a token in blocks of 128: 236,416 tokens, 7.21 requests of 32,768."""
    told = explain(
        "[worker_v1.py:287] Available memory: 11381826560, total memory: 65452113920\n"
        "GPU KV cache size: 236,416 tokens\nMaximum concurrency for 32,768 tokens per request: 7.21x\n"
    )
    assert told.server.engine == "vllm-ascend"
    assert told.server.kv_bytes_per_token == 48_128
    assert "--kv-bytes-per-token 48128 --available-kv-bytes 11381826560" in told.fit_command
    assert [str(said) for said in told.arithmetic] == [
        "10.60 GiB / 236,416 tokens = about 48,143 bytes of KV a token on each rank",
        "236,416 tokens / 32,768 a request = 7.21 requests of full length at once",
    ]


def test_ranks_that_print_the_same_are_told_as_one() -> None:
    told = explain(
        "(Worker_TP0 pid=1) [worker_v1.py:287] Available memory: 25084329472, total memory: 65452113920\n"
        "(Worker_TP1 pid=2) [worker_v1.py:287] Available memory: 25084186112, total memory: 65452113920\n"
    )
    assert str(told.says[-1]) == "23.36 GiB are left for the KV cache (line 2, TP1)"


def test_a_device_that_a_tool_names_lends_its_total() -> None:
    told = explain(
        "non-default args: {'model': 'Qwen/Qwen2.5-7B-Instruct', 'gpu_memory_utilization': 0.9}\n"
        "Available KV cache memory: 3.00 GiB\n"
        "| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |\n"
        "|   0  NVIDIA L40S                    Off |   00000000:01:00.0 Off |                    0 |\n"
        "| N/A   38C    P0             85W /  350W |    1200MiB /  46068MiB |      0%      Default |\n"
    )
    assert (told.server.device, told.server.device_guessed) == ("l40s", False)
    assert told.server.numbers["total_bytes"] == device("l40s").memory_bytes
    assert "--device l40s" in told.fit_command


def test_blocks_and_requests_of_v0_tell_the_tokens() -> None:
    told = explain(
        "INFO 01-02 03:04:05 executor_base.py:111] # cuda blocks: 13618, # CPU blocks: 2048\n"
        "INFO 01-02 03:04:05 executor_base.py:116] Maximum concurrency for 2048 tokens per request: 106.39x\n"
    )
    assert told.server.numbers["block_size"] == 16
    assert told.server.numbers["kv_tokens"] == 13_618 * 16
    assert "its KV cache holds 217,888 tokens" in str(told.verdict)


def test_a_cache_that_was_set_is_not_subtracted_from() -> None:
    told = explain(
        "Initial free memory 31.16 GiB, reserved 4.25 GiB memory for KV Cache as specified by kv_cache_memory_bytes "
        "config and skipped memory profiling.\nnon-default args: {'gpu_memory_utilization': 0.9}\n"
        "Free memory on device (31.00/32.0 GiB) on startup. Desired GPU memory utilization is (0.9, 28.8 GiB). Actual"
    )
    assert told.server.numbers["kv_cache_memory_bytes"] == (17 << 30) // 4
    assert told.arithmetic == ()


def test_terms_that_do_not_make_up_the_sum_are_told() -> None:
    text = (
        "the current vLLM instance can use total_gpu_memory (40.00GiB) x gpu_memory_utilization (0.90) = 36.00GiB\n"
        "model weights take 6.00GiB; non_torch_memory takes 1.00GiB; PyTorch activation peak memory takes 2.00GiB; the "
        "rest of the memory reserved for KV Cache is {}GiB.\n"
    )
    assert len(explain(text.format("27.00")).arithmetic) == 1
    assert "1.50 GiB more are charged" in str(explain(text.format("25.50")).arithmetic[1])
    assert "off by 1.00 GiB" in str(explain(text.format("28.00")).arithmetic[1])

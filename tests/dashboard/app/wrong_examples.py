"""What users of the dashboard get wrong, a row each: together they provoke every sentence that has a Chinese one.

::

    SETTINGS    settings, as "All settings" and links take them     UPLOADS    scenario files
    TRACES      files that workload.trace names                      FILES      other files that a setting names
    GRIDS, LOADS, PROMISES, TARGETS, FITS                            what the Capacity and Fit pages are asked
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from hbmtwin.workloads.formats.traces import FORMATS

TINY = Path(__file__).parents[2] / "sim" / "tiny"
PLAIN = f"model.name={TINY / 'plain.json'}"
WINDOWS = f"model.name={TINY / 'windows.json'}"
STATES = (f"model.name={TINY / 'states.json'}", "device.name=a100-80gb")
SHORT = "engine.max_model_len=1024"
CONTIGUOUS = "kv_cache.policy=contiguous"
VIRTUAL = ("kv_cache.policy=virtual", "memory.kv_arena=direct")
V0 = ("kv_cache.version=v0", "scheduler.policy=vllm_v0")
TRUNCATED = "kv_cache.retention='truncate(30)'"
SAMPLES = ("workload.samples=2", "session.turns=1")
ASYNC = "scheduler.async_scheduling=true"
DOUBLING_PAGED = ("kv_cache.preset=doubling", "kv_cache.policy=paged")
ONE_OF_EACH = "num_groups=1,num_prompts_per_group=1,system_prompt_len=1,question_len=1,output_len=1"
REPETITION = "workload.prefix_repetition={prefix_len=1,suffix_len=1,num_prefixes=1,output_len=1}"
RATE = "workload.request_rate=1"
BIG = "device.memory_bytes=1TiB"
VALUES = (
    *("x", "-1", "0", "1.5", "true", "[]", "{}", "''", "1e30", "1000000", "nan", "inf", "[1]", "[-1]", "['a']"),
    *("[[1]]", "{distribution='x'}", "{a=1}", "512Foo", "9" * 90, "[{}]", "[{a=1}]", "[1,2]", "[[0,1],[1,2]]"),
)
"""Given to every key: of the wrong kind, out of its range, too long, in a form that something else takes."""

SETTINGS: tuple[tuple[str, ...], ...] = (
    # the form of a setting
    *(("kv_cache",), ("seed=" + "[" * 4000,), ("kv_cache=1",), ("kv_cache.x=1", "kv_cache.x.y=1")),
    *(("kv_cache=1", "kv_cache.block_size=1"), ("seed=1", "seed.x=1"), ("kv_cache.presett=paged",), ("zzzzqq=1",)),
    # names
    *(("model.name=llama-2-7bb",), ("model.name=/nowhere/config.json",), ("model.name=zzz",), ("model.name=''",)),
    *(("device.name=h100",), ("device.name=zzz",), ("workload.preset=sharegpp",), ("workload.preset=zzz",)),
    *(("kv_cache.preset=page",), ("scheduler.policy=vlm",), ("memory.general=cach",), ("kv_cache.policy=page",)),
    *(("kv_cache.growth=exac",), ("kv_cache.decode_growth=exac",), ("kv_cache.retention='truncat(3)'",)),
    *(("kv_cache.retention=zzz",), ("kv_cache.retention='truncate(x)'",), ("kv_cache.retention='truncate(0)'",)),
    *(("kv_cache.retention='forget(10,20)'",), ("kv_cache.dtype=fp88",), ("kv_cache.dtype=zzz",)),
    *(("calibration.profile=cpu-epyc",), ("calibration.profile=zzz",), ("calibration.profile=cpu-epyc-1-thread",)),
    # further settings of a policy, and of the caching allocator
    *(("kv_cache.options={watermark=1}",), ("kv_cache.options={num_block=1}",), ("kv_cache.options={zzz=1}",)),
    *(("kv_cache.options={num_blocks='x'}",), ("kv_cache.options={num_blocks=100000000}",)),
    *(("kv_cache.options={num_blocks=2}", SHORT), ("kv_cache.options={num_blocks=2}", SHORT, *V0)),
    *(
        ("device.name=a100-80gb", f"memory.alloc_conf='{conf}'")
        for conf in (
            *("expandable_segmens:True", "zzz:1", "pinned_num_register_threads:3", "backend:x"),
            *("pinned_use_cuda_host_register:x", "per_process_memory_fraction:2"),
        )
    ),
    *(
        (f"memory.alloc_conf='{conf}'",)
        for conf in (
            *("expandable_segments:True,max_split_size_mb:200", "garbage_collection_threshold:2"),
            *("large_segment_size_mb:1", "max_split_size_mb:1", "base_addr_aligned_kb:99", "page_size:2g"),
            *("segment_size_mb:1", "expandable_segments:x", "roundup_power2_divisions:3", "max_split_size_mb:x"),
            *("roundup_power2_divisions:[3:1]", "max_split_size_mb:" + "9" * 24, "garbage_collection_threshold:x"),
            *("garbage_collection_threshold:1e999", "expandable_segments", "roundup_power2_divisions:[1"),
        )
    ),
    # policies of memory
    *(("memory.alignment_bytes=3",), ("memory.general=bump",), ("kv_cache.policy=virtual",)),
    (CONTIGUOUS, "memory.oom=preempt"),
    ("kv_cache.preset=paged", CONTIGUOUS),
    ("engine.task_queue_enable=2", "memory.general=direct"),
    *((CONTIGUOUS, "session.between_turns=prefix_cache"), ("session.between_turns=prefix_cache",)),
    *(("kv_cache.policy=radix", "memory.admission=reserve"), (*V0, "memory.admission=reserve")),
    *(("kv_cache.version=0.18", "kv_cache.watermark=0.1"), ("kv_cache.retention='forget(100,30)'",)),
    *(("kv_cache.policy=radix", TRUNCATED), ("engine.attention=standard",), ("scheduler.policy=static_batch",)),
    (CONTIGUOUS, "scheduler.policy=static_batch", TRUNCATED),
    (CONTIGUOUS, "scheduler.policy=static_batch", "session.between_turns=keep"),
    *(("kv_cache.policy=paged_v0",), ("kv_cache.policy=paged_groups",)),
    # schedulers
    *(("kv_cache.version=v0",), ("scheduler.policy=vllm_v0",), ("scheduler.policy=sglang",)),
    *((f"scheduler.policy={name}", "kv_cache.policy=radix") for name in ("max_utilization", "vllm_v0")),
    ("scheduler.policy=sglang", CONTIGUOUS),
    ("scheduler.policy=max_utilization", "memory.oom=stop"),
    ("scheduler.policy=max_utilization", *DOUBLING_PAGED, "kv_cache.version=0.27"),
    *((ASYNC, "scheduler.policy=prefill_first"), (ASYNC, "kv_cache.policy=radix"), (ASYNC, "memory.oom=stop")),
    *((ASYNC, "engine.pipeline_parallel_size=2"), (ASYNC, *DOUBLING_PAGED)),
    ("scheduler.policy=max_utilization", WINDOWS, "device.name=a100-80gb"),
    ("scheduler.policy=sglang", "kv_cache.policy=radix", "scheduler.max_num_batched_tokens=100"),
    # several answers to a prompt
    *(("workload.samples=2", more) for more in ("workload.multi_turn=x", "workload.users=3", "session.turns=2")),
    (*SAMPLES, "session.between_turns=keep", CONTIGUOUS),
    (*SAMPLES, "workload.max_concurrency=1"),
    *((*SAMPLES, "scheduler.max_num_seqs=1", *V0), (*SAMPLES, "scheduler.preemption_mode=recompute", *V0)),
    # a model on devices
    *(("engine.max_model_len=100000000",), ("kv_cache.retention='truncate(3000)'", CONTIGUOUS, SHORT)),
    *(("engine.tensor_parallel_size=3",), ("engine.tensor_parallel_size=32",), ("engine.pipeline_parallel_size=99",)),
    *(
        (f"model.name={name}", f"engine.tensor_parallel_size={ranks}", BIG)
        for name, ranks in (
            *(("bamba-9b", 3), ("deepseek-r1", 128), ("glm-4.5-air", 3), ("glm-4.5-air", 24), ("hunyuan-a13b", 3)),
            *(("llama-3.2-3b", 24), ("minimax-m2.5", 3), ("minimax-m2.5", 16), ("nemotron-nano-9b-v2", 3)),
        )
    ),
    *(("engine.layer_partition=[1,2]",), ("engine.pipeline_parallel_size=2", "device.name=cpu")),
    *(("engine.pipeline_parallel_size=2", *V0), (*STATES, "engine.pipeline_parallel_size=3")),
    ("memory.activations=per_layer", "model.name=qwen3-30b-a3b"),
    ("model.name=deepseek-v2-lite", "kv_cache.v_dtype=fp8"),
    ("model.name=deepseek-v2-lite", "kv_cache.dtype=int8", "device.name=h200"),
    ("kv_cache.dtype=fp8",),
    # windows and states
    *((WINDOWS, more) for more in (TRUNCATED, "kv_cache.version=0.22", "memory.admission=reserve")),
    *(
        (TRUNCATED, more)
        for more in ("kv_cache.version=0.22", "memory.admission=reserve", "kv_cache.enable_prefix_caching=true")
    ),
    *((*STATES, more) for more in ("kv_cache.policy=radix", "kv_cache.version=0.22", TRUNCATED)),
    *((*STATES, more) for more in ("kv_cache.disable_hybrid_kv_cache_manager=true", "memory.admission=reserve")),
    (*STATES, "kv_cache.mamba_cache_mode=all"),
    *(
        (*STATES, "kv_cache.enable_prefix_caching=true", *more)
        for more in (
            ("kv_cache.mamba_cache_mode=align", "scheduler.enable_chunked_prefill=false"),
            ("kv_cache.mamba_cache_mode=none",),
            ("kv_cache.mamba_cache_mode=align", "scheduler.policy=prefill_first"),
        )
    ),
    STATES[:1],
    # memory, once it is placed
    *(("results.cache_events=true", "kv_cache.policy=radix"), ("results.cache_events=true", *V0)),
    *((*VIRTUAL, "kv_cache.page_bytes=1GiB"), (*VIRTUAL, "kv_cache.page_bytes=65537")),
    *(
        (
            *("memory.kv_arena=pooled", "memory.alignment_bytes=1GiB", "engine.max_model_len=256"),
            *("kv_cache.block_size=16", f"engine.gpu_memory_utilization={share}"),
        )
        for share in (0.445, 0.475)
    ),
    *(("kv_cache.block_size=100000",), ("scheduler.max_num_batched_tokens=1000000",), ("device.memory_bytes=1GiB",)),
    # who asks, and when
    *(("workload.trace=x", "workload.model=y"), ("workload.preset=sharegpt", "workload.trace=x")),
    *(("workload.users=3", RATE), ("workload.ramp_up_strategy=linear", RATE), ("workload.ramp_up_strategy=linear",)),
    *(
        ("workload.ramp_up_strategy=linear", f"workload.ramp_up_start_rps={start}", "workload.ramp_up_end_rps=2", *more)
        for start, more in (("1", (RATE,)), ("inf", ()), ("1", ("workload.rate_curve=[[0,1],[1,2]]",)))
    ),
    *(("workload.ramp_up_start_rps=2",), ("workload.rescale_gaps=true",), ("workload.cv=2", "workload.burstiness=2")),
    *(("workload.burstiness=1e30",), ("workload.cv=99",)),
    *((more, "workload.arrival_pattern=constant") for more in ("workload.burstiness=2", "workload.cv=2")),
    *(
        (f"workload.rate_curve={curve}", RATE)
        for curve in ("[]", "[[1]]", "[[0,1],[0,2]]", "[[0,-1],[1,2]]", "[[0,0],[1,0]]")
    ),
    ("workload.rate_curve=[[0,1],[1,2]]", "workload.request_rate=inf"),
    *(("workload.clients=[{request_rate=1}]", "workload.users=2"), ("workload.clients=[]",)),
    ("workload.priorities=[0.0]",),
    *(("workload.prefix_count=3",), ("workload.prefix_buckets=[]",)),
    ("workload.prefix_buckets=[{prefix_tokens=3}]", "workload.prefix_tokens=3"),
    ("workload.prefix_buckets=[" + "{prefix_tokens=3,prefix_count=1000000}," * 2 + "]",),
    (f"workload.shared_prefix={{{ONE_OF_EACH}}}", REPETITION),
    *((REPETITION, "workload.prompt_tokens=3"), (REPETITION, "session.turns=3")),
    # lengths and times
    *(
        (f"workload.prompt_tokens={{{table}}}",)
        for table in (
            *("", "distribution='unifor'", "distribution='zzz'", "distribution='uniform'"),
            *(f"distribution='uniform',{more}" for more in ("lo=1", "zzz=1", "low='x',high=3", "low=3,high=1")),
            *(f"distribution='values',{more}" for more in ("values=1,weights=[1]", "values=[1],weights=[]")),
            *("distribution='values',values=[1],weights=[0]", "distribution='fixed',value=0"),
            *(
                f"distribution='lognormal',mean={more}"
                for more in (
                    *("'x',sigma=1", "3,sigma=1,min=3,max=1", "-1,sigma=1", "-1,median=1", "3,sigma=99", "3"),
                    "3,median=9",
                )
            ),
            *("distribution='zipf',alpha=99,max=3", "distribution='zipf',alpha=1,max=1000000000"),
            *(
                f"distribution='quantiles',probabilities={more}"
                for more in (
                    *("[0],values=[1]", "[0,2],values=[1,2]", "[0.5,0.2],values=[1,2]", "[0,1],values=[2,1]"),
                    "[0,1],values=[0,1]",
                )
            ),
        )
    ),
    *(("session.think_time_s=1e30",), ("session.think_time_s={distribution='lognormal',mean=3,sigma=99}",)),
    # paths
    *((f"workload.trace={path}",) for path in ("/nowhere/x", "/dev/zero", TINY, TINY / "requests.cs", "x" * 300)),
    *(('workload.trace="a\\u0000"',), ('calibration.profile="a\\u0000.json"',)),
    *(("calibration.profile=/nowhere/x.json",), (f"calibration.profile={'x' * 300}.json",)),
    *(
        (f"workload.trace={TINY / 'requests.csv'}", more)
        for more in ("workload.trace_skip=900", "workload.trace_format=azur", "workload.trace_format=zzz")
    ),
)

RUNS: tuple[tuple[str, ...], ...] = (
    ("workload.request_rate=1e-9", "workload.num_prompts=100"),
    ("workload.ramp_up_strategy=linear", "workload.ramp_up_start_rps=1e-9", "workload.ramp_up_end_rps=1e-9"),
    ("workload.rate_curve=[[0,1e-6],[1e9,1e-6]]", "workload.request_rate=1e-3"),
    ("workload.users=1", "workload.num_prompts=60", "session.turns=60", "session.think_time_s=1e8"),
)
"""What is found out only as requests are drawn; of the tiny model."""

UPLOADS = (
    *("[模型]", "a=2024-02-30", 'a="\\xz"', 'a="\\uz"', "[[a]", 'a="\x01"'),
    *("[seed", "a==1", "seed=1 2", "seed=1\nseed=2", "[a]\n[a]", "x={a=1,a=2}", 's="abc', "s='''x", "a=[1", "a={b=1"),
    *('s="\\q"', "=1", "a=\x01", "seed=" + "[" * 4000, "seed=" + "9" * 5000, "kv_cache.x=1", "a\n", "s='\x01'"),
    *("[kv_cache]\nblock_size='x'", b"\xff\xfe", b"a='\xe4\xb8'", b"a='\xe4\xb8"),
)
"""Scenario files."""

HEADER = "arrival_s,prompt_tokens,output_tokens"
TRACES = (
    *("x,y\n1,2\n", "arrival_s,prompt_token,output_tokens\n1,2,3\n", "arrival_s,prompt_tokens\n1,2\n"),
    *(f"{HEADER},{more}\n1,2,3,4\n" for more in ("zzz", "sessio", "arrival_s")),
    *(f"{HEADER}\n{row}\n" for row in ("1,2", "1,x,3", "1,0,3", "1,9999999999999999,3", "-1,1,3", "x,1,3")),
    *(f"{HEADER}\n{row}\n" for row in ("5,1,3\n3,1,1", "4e10,1,1")),
    *("", f"{HEADER}\n", "[1]\n", b"\xff\xfe\x00", gzip.compress(f"{HEADER}\n1,2,3\n".encode())[:-12], b"PK\x03\x04"),
    *('{"a":\n', '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1}\n{"a"\n'),
    *(f"{','.join((*format.required[:-1], 'q', 'z'))}\n" for format in FORMATS),
)
"""Files that ``workload.trace`` names."""

WHOLE: dict[str, Any] = json.loads((TINY / "plain.json").read_text())
NAMED_FILES: tuple[tuple[str, str, str], ...] = (
    *(("workload.model", "toml", text) for text in ("a=", "a=1 2")),
    ("workload.multi_turn", "json", "{"),
    *(("calibration.profile", "json", text) for text in ("{", "{}", "[1] 2", '{"a":1 "b"', '{"a', '{"format":"x"}')),
    *(("model.name", "json", text) for text in ("{", "[]", "[1] 2", '{"a":1 "b"', '{"a', " " * 2**21, "{}")),
    *(
        ("model.name", "json", json.dumps(WHOLE | edit))
        for edit in (
            *({"hidden_size": "8"}, {"hidden_size": -1}, {"tie_word_embeddings": 3}, {"num_key_value_heads": 5}),
            *({"hidden_size": 1025, "head_dim": None}, {"is_encoder_decoder": True}, {"torch_dtype": "zzz"}),
            *({"sliding_window": -3}, {"quantization_config": {"quant_method": "zzz"}}),
            {"layer_types": ["full_attention"]},
        )
    ),
)
"""Other files, by the key that names them."""
AWQ = json.dumps(WHOLE | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}})

GRIDS = (
    *(("",), ("x",), ("seed=1,2",), ("kv_cache.presett=1",), ("kv_cache.preset=paged,",), ("kv_cache.preset=[1",)),
    *(("workload.users=1:x:3",), ("workload.users=5:1:3",), ("workload.users=1:1000000:1",)),
    ("workload.users=1", "workload.users=2"),
)
LOADS = ("x", "time_scale=1", "user=1", "zzz=1", "users=1.5", "users=x", "users=5:1:1", "users=1:5:x1", "users=-1")
MORE_LOADS = ("users=1:100000:1", "users=1:2")
UNFIT_LOADS = (
    *(("rate_scale=1", RATE), ("request_rate=1", "workload.users=2"), ("users=1", RATE)),
    ("users=1", f"workload.trace={TINY / 'requests.csv'}"),
)
WINDOWS_OF_A_TRACE = tuple(
    (f"workload.trace={TINY / 'requests.csv'}", *more)
    for more in (
        ("workload.num_prompts=1",),
        ("workload.num_prompts=1", "workload.trace_skip=2"),
        ("workload.num_prompts=900",),
        ("workload.num_prompts=900", "workload.trace_skip=2"),
    )
)
PROMISES = ("x", "ttft_p9=2s", "zzz=2s", "ttft_p99=2s,ttft_p99=3s", ",", "ttft_p99=x", "ttft_p99=0s")
TARGETS = (
    *(("users", RATE), ("users", "workload.clients=[{request_rate=1}]"), ("users", "workload.ramp_up_strategy=linear")),
    *(("request_rate", "workload.users=2"), ("request_rate", "workload.clients=[{request_rate=1}]")),
)
FITS: tuple[dict[str, Any], ...] = (
    *({"engine": "sglan"}, {"engine": "zzz"}, {"engine": "mindie", "device": "a100-80gb"}),
    *({"engine": "sglang", "gpu_memory_utilization": 0.5}, {"enable_expert_parallel": True}, {"max_num_seqs": 0}),
    *({"max_num_seqs": 300, "max_num_batched_tokens": 20}, {"gpu_memory_utilization": 2.0}),
    {"max_num_batched_tokens": 20, "max_num_seqs": 3, "enable_chunked_prefill": False},
    *({"tensor_parallel_size": 3}, {"pipeline_parallel_size": 99}, {"kv_cache_dtype": "zzz"}, {"quantization": "zzz"}),
    *({"model": "glm-4-9b", "device": "h100-80gb", "quantization": "awq", "tensor_parallel_size": 8}, {"model": "zzz"}),
    {"model": "phi-2", "device": "h100-80gb", "quantization": "awq", "tensor_parallel_size": 8},
    {"model": "qwen1.5-moe-a2.7b", "device": "h100-80gb", "quantization": "awq", "tensor_parallel_size": 2},
    {
        "model": "qwen1.5-moe-a2.7b",
        "device": "h100-80gb",
        "quantization": "awq",
        "tensor_parallel_size": 8,
        "enable_expert_parallel": True,
    },
)

"""``kv_cache.dtype`` and ``v_dtype``: names, bytes, and what the attention ops of a vendor do not read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.allocators.records import KVDtype, KVLayout
from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.catalog import device, model, models
from hbmtwin.sim.kv_layout import DTYPES, kernel_notes, kv_layout, kv_refusal, scale_tensors
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError

LLAMA_7B = ModelShape("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096)
GROUPED = replace(LLAMA_7B, name="grouped", num_kv_heads=8)
MLA = ModelShape(
    *("mla", 32, 2048, 6144, 16, 16, 192, 128256, 131072),
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
B2, A100, H100 = device("ascend-910b2"), device("a100-80gb"), replace(device("a100-80gb"), family="hopper")


@pytest.mark.parametrize(
    ("dtype", "token_kib"),
    [
        ("auto", 512),
        ("float16", 512),
        ("bfloat16", 512),
        ("fp8", 256),
        ("fp8_e4m3", 256),
        ("fp8_e5m2", 256),
        ("int8", 256),
        ("int8_per_token", 256.25),
        ("int8_per_token_head", 264),
        ("fp8_per_token_head", 264),
        ("int4", 128),
        ("int4_per_token", 128.25),
        ("int4_per_token_head", 136),
    ],
)
def test_kib_of_a_token_of_the_7b_by_name(dtype: str, token_kib: float) -> None:
    assert kv_layout(LLAMA_7B, dtype=dtype).token_bytes == token_kib * 1024


def test_every_name_is_read_and_no_other() -> None:
    assert len({kv_layout(LLAMA_7B, dtype=name).dtype for name in DTYPES}) == 8
    with pytest.raises(ValueError, match=r"unknown dtype 'int8_per_tokens': did you mean 'int8_per_token'\? Known are"):
        kv_layout(LLAMA_7B, dtype="int8_per_tokens")
    with pytest.raises(ValueError, match=r"unknown v_dtype 'fp9': did you mean 'fp8'\?"):
        kv_layout(LLAMA_7B, v_dtype="fp9")
    with pytest.raises(ValueError, match=r"unknown dtype 'x': Known are auto, float16, bfloat16, fp8"):
        kv_layout(LLAMA_7B, dtype="x")


def test_auto_is_the_dtype_of_the_model() -> None:
    assert kv_layout(replace(LLAMA_7B, dtype_bytes=4)).token_bytes == 2 * kv_layout(LLAMA_7B).token_bytes


def test_v_apart_from_k() -> None:
    layout = kv_layout(LLAMA_7B, v_dtype="int4_per_token_head", tensor_parallel_size=2)
    assert layout == KVLayout(32, 32, 128, tensor_parallel_size=2, v_dtype=KVDtype(4, "token_head"))
    assert layout.tensor_bytes == (4096, 1024, 64)


def test_mla_keeps_its_latent_where_the_engine_does_so_and_writes_heads_out_where_not() -> None:
    assert kv_layout(MLA, tensor_parallel_size=4).tensor_bytes == (1152,)
    assert kv_layout(MLA, dtype="fp8").tensor_bytes == (576,)
    written_out = kv_layout(replace(MLA, latent_cache=False), tensor_parallel_size=4)
    assert written_out.tensor_bytes == (4 * 192 * 2, 4 * 192 * 2)
    with pytest.raises(ValueError, match="v_dtype: 'int8' where mla keeps one latent tensor and no V"):
        kv_layout(MLA, v_dtype="int8")
    with pytest.raises(ValueError, match=r"the latent tensor of mla .MLA. cannot be stored as 'int8_per_token_head'"):
        kv_layout(MLA, dtype="int8_per_token_head")


def test_constant_scales_have_names_and_bytes() -> None:
    tensors = list(scale_tensors(kv_layout(LLAMA_7B, dtype="int8")))
    assert tensors[:3] == [("layers.0.k_scale", 8192), ("layers.0.v_scale", 8192), ("layers.1.k_scale", 8192)]
    assert sum(size for _, size in tensors) == 512 * 1024
    assert next(scale_tensors(kv_layout(LLAMA_7B, v_dtype="int8"))) == ("layers.0.v_scale", 8192)
    assert next(scale_tensors(kv_layout(MLA, dtype="fp8"))) == ("layers.0.k_scale", 4)
    assert list(scale_tensors(kv_layout(LLAMA_7B, dtype="int8_per_token"))) == []


@pytest.mark.parametrize(
    ("on", "dtype", "v_dtype", "reason"),
    [
        (B2, "auto", None, None),
        (B2, "auto", "float16", None),
        (B2, "int8", None, None),
        (B2, "int8_per_token", None, None),
        (B2, "int8_per_token_head", "int8_per_token_head", None),
        (B2, "int4_per_token_head", None, "kv_cache.dtype: int4 with a block table"),
        (B2, "auto", "int4", "kv_cache.v_dtype: int4 with a block table"),
        (B2, "auto", "int8", "kv_cache.v_dtype: K and V apart"),
        (B2, "int8", "int8_per_token", "kv_cache.v_dtype: K and V apart"),
        (A100, "fp8", None, None),
        (H100, "fp8", None, None),
        (A100, "int4_per_token_head", None, None),
        (A100, "auto", "fp8", "kv_cache.v_dtype: K and V apart: vLLM has one kv_cache_dtype"),
        (A100, "int8", None, "kv_cache.dtype: 'int8' is a dtype of the NPU ops"),
    ],
    ids=str,
)
def test_what_a_paged_engine_does_not_read(on: DeviceSpec, dtype: str, v_dtype: str | None, reason: str | None) -> None:
    refusal = kv_refusal(on, LLAMA_7B, dtype=dtype, v_dtype=v_dtype, paged=True)
    assert (refusal is None) if reason is None else (refusal or "").startswith(reason)


def test_what_no_op_of_an_npu_reads() -> None:
    def refusal(model: ModelShape = LLAMA_7B, dtype: str = "auto", v_dtype: str | None = None) -> str | None:
        return kv_refusal(B2, model, dtype=dtype, v_dtype=v_dtype)

    assert refusal() is refusal(dtype="int4") is refusal(v_dtype="int8") is None
    assert "Atlas A2 has no FP8" in (refusal(dtype="fp8_e4m3") or "")
    assert "Atlas A2 has no FP8" in (refusal(v_dtype="fp8_per_token_head") or "")
    narrow = replace(LLAMA_7B, head_dim=80)
    assert refusal(narrow) is None
    assert refusal(narrow, "int8") == (
        "kv_cache.dtype: 'int8' with head_dim 80: npu_fused_infer_attention_score needs a multiple of 32, at most 512"
    )
    assert "a multiple of 64" in (refusal(replace(LLAMA_7B, head_dim=96), v_dtype="int4") or "")
    assert "a multiple of 16" in (refusal(replace(LLAMA_7B, head_dim=100)) or "")
    assert "at most 512" in (refusal(replace(LLAMA_7B, head_dim=1024)) or "")
    assert (refusal(narrow, "fp8") or "").endswith("use one of auto, float16, bfloat16")
    assert (refusal(replace(LLAMA_7B, head_dim=96), v_dtype="int4") or "").startswith("kv_cache.v_d")
    assert refusal(MLA) is refusal(MLA, "float16") is refusal(dtype="fp9") is refusal(v_dtype="int7") is None
    for quantised in ("fp8", "int8", "int4_per_token_head"):
        assert refusal(MLA, quantised) == (
            f"kv_cache.dtype: '{quantised}' for the latent tensor of mla (MLA): Atlas A2 has no FP8, and a latent is "
            "not stored in integers; use one of auto, float16, bfloat16"
        )
    assert "256 + 32 elements" in (refusal(replace(MLA, kv_lora_rank=256, qk_rope_head_dim=32)) or "")
    assert kv_refusal(A100, narrow, dtype="int8", v_dtype=None) is None
    assert (kv_refusal(replace(B2, family="310p"), MLA, dtype="auto", v_dtype=None) or "").startswith("model.name: mla")


def notes_of(on: DeviceSpec, dtype: str, v_dtype: str | None, *, paged: bool) -> tuple[str, ...]:
    return kernel_notes(on, LLAMA_7B, dtype=dtype, v_dtype=v_dtype, paged=paged)


def test_a_quantised_cache_on_an_npu_comes_with_a_remark() -> None:
    assert notes_of(B2, "auto", None, paged=True) == notes_of(A100, "fp8", None, paged=True) == ()
    assert notes_of(B2, "int8", None, paged=False) == ()
    (note,) = notes_of(B2, "int8", None, paged=True)
    assert note.startswith("kv_cache.dtype = int8: npu_fused_infer_attention_score reads a quantised cache")
    (note,) = notes_of(A100, "auto", "int4", paged=False)
    assert note.startswith("kv_cache.v_dtype = int4: a dtype of the NPU ops")
    (note,) = kernel_notes(replace(B2, family="310p"), GROUPED, dtype="auto", v_dtype=None, paged=False)
    assert note.startswith("npu_prompt_flash_attention on 310P has no grouped queries")


def rows_of_the_docs(first_header: str) -> list[list[str]]:
    """The rows of the table in docs/index.md whose first column has that header."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "index.md").read_text(encoding="utf-8")
    table = text.partition(f"| {first_header} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_table_of_dtypes_in_the_docs_is_true() -> None:
    listed: list[str] = []
    for names, size, _, on_ascend, on_cuda in rows_of_the_docs("dtype"):
        for name in names.replace("`", "").split(", "):
            listed.append(name)
            assert f"{kv_layout(LLAMA_7B, dtype=name).token_bytes / 1024:g} KiB" == size
            for on, told in ((B2, on_ascend), (A100, on_cuda)):
                refusal = kv_refusal(on, LLAMA_7B, dtype=name, v_dtype=None, paged=True)
                assert (refusal is None) == (told == "yes"), name
    assert sorted(listed) == sorted(DTYPES)


def test_the_table_of_models_in_the_docs_is_true() -> None:
    rows = rows_of_the_docs("model")
    named = {name.strip("`") for name, *_ in rows}
    assert named <= set(models())
    assert len(named) == len(rows) > 15
    for name, _, size in rows:
        assert f"{kv_layout(model(name.strip('`'))).token_bytes / 1024:g} KiB" == size.partition(",")[0]


def scenario(model_name: str = "llama-2-7b", device: str = "ascend-910b2", **kv_cache: str) -> Scenario:
    return Scenario.model_validate(
        {
            "model": {"name": model_name},
            "device": {"name": device},
            "engine": {"max_model_len": 2048},
            "kv_cache": {"policy": "contiguous", "block_size": 128, **kv_cache},
            "workload": {"request_rate": 4, "num_prompts": 6, "prompt_tokens": 300, "output_tokens": 20},
        }
    )


@pytest.mark.parametrize(
    ("kv_cache", "token_bytes"),
    [
        ({"dtype": "int8_per_token_head", "policy": "paged"}, 270_336),
        ({"dtype": "int8_per_token_head"}, 270_336),
        ({"v_dtype": "int4"}, 327_680),
        ({"dtype": "int8", "v_dtype": "int8_per_token", "tensors": "merged", "copy_scope": "step"}, 262_272),
    ],
    ids=str,
)
def test_books_close_over_tensors_of_any_size(kv_cache: dict[str, str], token_bytes: int) -> None:
    twin = Twin(scenario(**kv_cache))
    assert twin.layout.token_bytes == token_bytes
    timeline = twin.run().timeline
    assert timeline["kv_tokens"].max() > 0
    assert (timeline["kv_tokens"] % token_bytes == 0).all()


@pytest.mark.parametrize("policy", ["paged", "contiguous"])
def test_books_close_over_a_latent(policy: str) -> None:
    timeline = Twin(scenario("youtu-llm-2b", policy=policy)).run().timeline
    assert timeline["kv_tokens"].max() > 0
    assert (timeline["kv_tokens"] % (32 * 1152) == 0).all()


def test_constant_scales_are_loaded_with_the_weights() -> None:
    def weights(dtype: str) -> int:
        return int(Twin(scenario(dtype=dtype)).run().timeline["weights"].iloc[0])

    assert weights("int8") - weights("int8_per_token") == 512 * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int7"}, r"^kv_cache.dtype: unknown dtype 'int7': did you mean 'int"),
        ({"dtype": "fp8"}, "^kv_cache.dtype: 'fp8': Atlas A2 has no FP8"),
        ({"dtype": "int4", "policy": "paged"}, "^kv_cache.dtype: int4 with a block table"),
        ({"v_dtype": "int7"}, r"^kv_cache.v_dtype: unknown v_dtype 'int7': did you mean 'int"),
        (
            {"v_dtype": "fp8"},
            "^kv_cache.v_dtype: 'fp8': Atlas A2 has no FP8; use one of int8, int8_per_token, ",
        ),
        ({"v_dtype": "int8", "model_name": "youtu-llm-2b"}, "^kv_cache.v_dtype: 'int8' where youtu-llm-2b keeps one"),
        ({"v_dtype": "int8", "policy": "paged"}, "^kv_cache.v_dtype: K and V apart"),
        ({"dtype": "int8", "policy": "paged", "device": "a100-80gb"}, "^kv_cache.dtype: 'int8' is a dtype of the NPU"),
        (
            {"dtype": "int8", "model_name": "youtu-llm-2b"},
            "^kv_cache.dtype: 'int8' for the latent .* float16, bfloat16$",
        ),
        ({"dtype": "fp8", "model_name": "youtu-llm-2b"}, "^kv_cache.dtype: 'fp8' for the latent .* float16, bfloat16$"),
        (
            {"dtype": "int8", "model_name": "youtu-llm-2b", "device": "a100-80gb"},
            "^kv_cache.dtype: the latent tensor of youtu-llm-2b .* use one of .*, fp8, fp8_e4m3, fp8_e5m2$",
        ),
    ],
    ids=str,
)
def test_a_run_refuses_what_cannot_be_read(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        Twin(scenario(**changes))


def test_a_run_over_a_quantised_cache_says_what_its_times_leave_out() -> None:
    notes = Twin(scenario(dtype="int8", policy="paged")).run().summary["notes"]
    assert any(note.startswith("kv_cache.dtype = int8: npu_fused_infer") for note in notes)
    assert not any("npu_fused_infer" in note for note in Twin(scenario(dtype="int8")).run().summary["notes"])


def notes_on(device: str, **changes: Any) -> list[str]:
    on = Scenario.model_validate({**scenario(device=device).model_dump(), **changes})
    return list(Twin(on).run().summary["notes"])


def test_what_belongs_to_an_npu_is_told_on_another_vendors_device() -> None:
    int4 = {"kv_cache": {"policy": "contiguous", "dtype": "int4"}}
    told = "kv_cache.dtype = int4: a dtype of the NPU ops; the times on CUDA are those of a kernel that would read it"
    assert told in notes_on("a100-80gb", **int4)
    assert told not in notes_on("ascend-910b2", **int4)
    queue = {"engine": {"max_model_len": 2048, "task_queue_enable": 2}, "memory": {"activations": "per_layer"}}
    told = "engine.task_queue_enable is Ascend's, and has no effect on a100-80gb"
    assert told in notes_on("a100-80gb", **queue)
    assert not any("task_queue" in note for note in notes_on("ascend-910b2", **queue))

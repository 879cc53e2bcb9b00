"""How far the overheads that hbmtwin predicts are from public boot logs: activations, non-torch, graphs, context.

    python benchmarks/overheads.py

Each row is a log of somebody's start: model, split, release, and what it measured, in GiB. Nothing here was measured by
us, and nothing is fitted to a row: coefficients are those of :mod:`hbmtwin.sim.engines`. The logs of vLLM 0.19 are of
llm-d-incubation/llm-d-planner d3121e05 (H100 with 79.19 GiB, 8,192 tokens a batch, 1,024 sequences, utilisation 0.95).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import nan
from statistics import mean

from hbmtwin.kernels.records import DeviceSpec, Experts, ModelShape, Quantization
from hbmtwin.kernels.stages import stage_layers, stage_shapes
from hbmtwin.sim.catalog import device
from hbmtwin.sim.engines import (
    GIB,
    Account,
    EngineRules,
    Estimate,
    Ranks,
    activation_peak,
    context,
    engine_rules,
    graph_pool,
    non_torch,
)

H100 = replace(device("h100-80gb"), memory_bytes=round(79.19 * GIB), multiprocessor_count=132)


def dense(
    name: str, layers: int, hidden: int, inner: int, heads: tuple[int, int, int], vocabulary: int, **more: object
) -> ModelShape:
    """A model by the sizes that overheads depend on; *heads* are query heads, KV heads and the width of one."""
    query, kv, width = heads
    return ModelShape(name, layers, hidden, inner, query, kv, width, vocabulary, 131_072, **more)


LLAMA_8B = dense("Llama-3.1-8B", 32, 4096, 14_336, (32, 8, 128), 128_256)
LLAMA_70B_FP8 = dense(
    "Llama-3.3-70B fp8",
    80,
    8192,
    28_672,
    (64, 8, 128),
    128_256,
    quantization=Quantization(method="fp8", weight_bits=8, weight_type="float", activation_bits=8),
)
QWEN_7B = dense("Qwen2.5-7B", 28, 3584, 18_944, (28, 4, 128), 152_064)
QWEN_72B = dense("Qwen2.5-72B", 80, 8192, 29_568, (64, 8, 128), 152_064)
QWEN3_14B = dense("Qwen3-14B", 40, 5120, 17_408, (40, 8, 128), 151_936)
MISTRAL_SMALL = dense("Mistral-Small-3.1-24B", 40, 5120, 32_768, (32, 8, 128), 131_072)
W8A8 = Quantization(method="compressed-tensors", weight_bits=8, activation_bits=8)
MIXTRAL = dense(
    "Mixtral-8x7B",
    32,
    4096,
    14_336,
    (32, 8, 128),
    32_000,
    experts=Experts(num_experts=8, experts_per_token=2, intermediate_size=14_336),
)
V2_LITE = dense(
    "DeepSeek-V2-Lite",
    27,
    2048,
    10_944,
    (16, 16, 192),
    102_400,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    experts=Experts(
        num_experts=64,
        experts_per_token=6,
        intermediate_size=1408,
        shared_intermediate_size=2816,
        dense_layers=frozenset({0}),
    ),
)
QWEN3_30B = dense(
    "Qwen3-30B-A3B",
    48,
    2048,
    6144,
    (32, 4, 128),
    151_936,
    experts=Experts(num_experts=128, experts_per_token=8, intermediate_size=768),
)
GPT_OSS = dense(
    "gpt-oss-20b",
    24,
    2880,
    2880,
    (64, 8, 64),
    201_088,
    experts=Experts(num_experts=32, experts_per_token=4, intermediate_size=2880),
    quantization=Quantization(method="mxfp4", weight_bits=4, weight_type="float", group_size=32),
)
SCOUT = dense(
    "Llama-4-Scout",
    48,
    5120,
    16_384,
    (40, 8, 128),
    202_048,
    experts=Experts(num_experts=16, experts_per_token=1, intermediate_size=8192, shared_intermediate_size=8192),
)


@dataclass(frozen=True, kw_only=True)
class Log:
    """One start, and what it logged in GiB; None: not told."""

    model: ModelShape
    activations: float
    engine: str = "vllm"
    version: str = "0.19"
    tp: int = 1
    pp: int = 1
    tokens: int = 8192
    seqs: int = 1024
    image: bool = False
    """Image input: merged embeddings are two more hidden states, which no text model has and hbmtwin does not plan."""
    non_torch: float | None = None
    graphs: float | None = None
    weights: float | None = None
    kv: float | None = None
    """What was left at a utilisation of 0.95."""
    largest: int = 512
    """Of the captured sizes."""
    full: bool = True
    """Whether they were captured in full too."""
    outlier: str = ""
    """Why it is left out of the means."""

    @property
    def rules(self) -> EngineRules:
        """Of its engine and release, with the sizes that it captured."""
        rules = engine_rules(self.engine, self.version)
        if self.largest > 512:
            sizes = (*rules.capture_sizes, *range(528, self.largest + 1, 16))
            rules = replace(rules, capture_sizes=sizes)
        return rules if self.full else replace(rules, full_graphs=False)

    @property
    def device(self) -> DeviceSpec:
        """What it ran on."""
        return device("ascend-910c") if self.engine == "vllm-ascend" else H100

    @property
    def stage(self) -> ModelShape:
        """What was on the rank that logged; of a pipeline the first stage."""
        return stage_shapes(self.model, stage_layers(self.model.num_layers, self.pp))[0]

    @property
    def ranks(self) -> Ranks:
        """How the model was split."""
        return Ranks(self.tp, self.pp)

    def predicted_activations(self) -> Estimate:
        """What hbmtwin says of it."""
        size = activation_peak(
            self.rules,
            self.stage,
            self.device,
            tensor_parallel_size=self.tp,
            max_num_batched_tokens=self.tokens,
            max_num_seqs=self.seqs,
        )
        merged = 2 * 2 * self.tokens * self.model.hidden_size if self.image else 0
        return Estimate(size.bytes + merged, size.low + merged, size.high + merged, size.source)

    def predicted_non_torch(self) -> Estimate:
        """The same of what libraries took."""
        return non_torch(self.rules, self.stage, self.ranks)

    def predicted_kv(self) -> Estimate:
        """What the engine's division leaves of the logged weights and the predicted rest."""
        activations, libraries = self.predicted_activations(), self.predicted_non_torch()
        weights = round((self.weights or 0.0) * GIB)

        def left(activations: int, non_torch: int) -> int:
            total = self.device.memory_bytes
            return self.rules.divide(Account(total, 0, UTILISATION, 0, weights, activations, non_torch, graphs=0)).kv

        return Estimate(
            left(activations.bytes, libraries.bytes),
            left(activations.high, libraries.high),
            left(activations.low, libraries.low),
            "the division of its engine",
        )

    def predicted_graphs(self) -> Estimate:
        """The same of graphs."""
        return graph_pool(
            self.rules,
            self.stage,
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.tokens,
            ranks=self.ranks,
        )


UTILISATION = 0.95


def h100(
    model: ModelShape, weights: float, activations: float, non_torch: float, graphs: float, kv: float, **more: object
) -> Log:
    """A log of llm-d-planner's vLLM 0.19.0."""
    return Log(model=model, weights=weights, activations=activations, non_torch=non_torch, graphs=graphs, kv=kv, **more)


LOGS: tuple[Log, ...] = (
    h100(dense("CodeLlama-7b", 32, 4096, 11_008, (32, 32, 128), 32_016), 12.56, 0.77, 0.25, 0.89, 61.66),
    h100(LLAMA_8B, 14.99, 1.89, 0.25, 0.91, 58.11),
    h100(LLAMA_8B, 7.51, 1.89, 2.07, 0.76, 63.76, tp=2),
    h100(replace(LLAMA_8B, name="Llama-3.1-8B fp32", dtype_bytes=4), 29.98, 2.21, 0.25, 0.79, 42.8),
    h100(LLAMA_8B, 7.51, 1.10, 0.07, 0.65, 66.54, pp=2),
    h100(LLAMA_70B_FP8, 33.88, 1.96, 2.10, 1.79, 37.28, tp=2),
    h100(QWEN_7B, 14.25, 2.21, 0.24, 0.87, 58.53),
    h100(QWEN_7B, 3.55, 2.21, 2.13, 0.64, 67.34, tp=4),
    h100(QWEN_72B, 67.8, 2.29, 2.09, 1.61, 3.04, tp=2),
    h100(dense("gemma-2-2b", 26, 2304, 9216, (8, 4, 256), 256_000), 4.9, 3.62, 0.24, 0.71, 66.47),
    h100(dense("gemma-2-27b", 46, 4608, 36_864, (32, 16, 128), 256_000), 50.72, 3.66, 0.26, 1.23, 20.59),
    h100(dense("gemma-7b", 28, 3072, 24_576, (16, 16, 256), 256_000), 15.91, 3.63, 0.25, 0.94, 55.44),
    h100(dense("gemma-3-4b", 34, 2560, 10_240, (8, 4, 256), 262_208), 8.58, 3.89, 0.25, 0.67, 62.51, image=True),
    h100(dense("gemma-3-27b", 62, 5376, 21_504, (32, 16, 128), 262_208), 51.45, 3.99, 0.26, 1.14, 19.53, image=True),
    h100(dense("granite-3.1-8b", 40, 4096, 12_800, (32, 8, 128), 49_155), 15.25, 0.85, 0.46, 0.98, 58.66),
    h100(
        dense("granite-vision-3.3-2b", 40, 2048, 8192, (32, 8, 64), 49_156), 5.54, 0.79, 0.25, 0.82, 68.65, image=True
    ),
    h100(dense("phi-2", 32, 2560, 10_240, (32, 32, 80), 51_200, gated_mlp=False), 5.19, 0.79, 0.24, 0.76, 69.0),
    h100(MISTRAL_SMALL, 44.76, 2.03, 0.25, 1.06, 28.19, image=True),
    h100(
        replace(MISTRAL_SMALL, name="Mistral-Small-3.1-24B w8a8", quantization=W8A8),
        24.07,
        2.18,
        0.26,
        1.22,
        48.73,
        image=True,
    ),
    h100(MIXTRAL, 43.51, 1.21, 2.07, 0.93, 28.44, tp=2),
    h100(V2_LITE, 29.43, 1.93, 0.26, 1.57, 43.61),
    h100(QWEN3_30B, 56.88, 2.68, 0.27, 1.41, 15.41),
    h100(GPT_OSS, 13.64, 2.87, 0.25, 1.84, 58.47, largest=1024),
    h100(SCOUT, 53.12, 3.19, 2.17, 1.13, 16.75, tp=4, image=True, full=False),
    Log(model=QWEN3_14B, version="0.16", activations=5.64, non_torch=0.13),
    Log(model=QWEN3_14B, version="0.17", activations=2.23, non_torch=0.13),
    Log(model=QWEN3_14B, version="0.18", activations=2.23, non_torch=0.25),
    Log(model=LLAMA_8B, version="0.11", activations=4.76, non_torch=0.13),
    Log(
        model=dense("Qwen3-32B", 64, 5120, 25_600, (64, 8, 128), 151_936),
        version="0.11",
        activations=5.64,
        non_torch=0.14,
    ),
    Log(model=GPT_OSS, version="0.11", activations=7.38, non_torch=0.13),
    Log(
        model=replace(MISTRAL_SMALL, name="Mistral-Small-3.2-24B"),
        version="0.11",
        activations=2.12,
        non_torch=0.14,
        image=True,
        outlier="no formula of that release comes near: 4.9 expected",
    ),
    Log(model=LLAMA_8B, version="V0", seqs=256, activations=1.26, non_torch=1.79),
    Log(
        model=dense("llava-v1.6-mistral-7b", 32, 4096, 14_336, (32, 8, 128), 32_064),
        version="0.10.2",
        tokens=16_384,
        activations=1.97,
        non_torch=0.07,
        graphs=0.67,
        image=True,
    ),
    Log(
        model=dense("Qwen2.5-32B", 64, 5120, 27_648, (40, 8, 128), 152_064),
        version="V0",
        tp=2,
        tokens=10_000,
        seqs=256,
        activations=1.26,
        non_torch=0.30,
        outlier="sequences not told, tokens rounded",
    ),
    Log(
        model=dense("Qwen3-Embedding-0.6B", 28, 1024, 3072, (16, 8, 128), 151_669, tie_word_embeddings=True),
        engine="vllm-ascend",
        version="0.20",
        seqs=256,
        activations=0.24,
        non_torch=0.0,
        graphs=0.10,
    ),
)
"""The shared points: those of a log that tells what the formula asks for."""

CONTEXTS: tuple[tuple[str, ModelShape, Ranks, float], ...] = (
    ("tp 1", LLAMA_8B, Ranks(), 0.51),
    ("tp 2", LLAMA_8B, Ranks(2), 1.51),
    ("tp 4", QWEN_7B, Ranks(4), 1.53),
    ("pp 2", LLAMA_8B, Ranks(1, 2), 1.45),
    ("MoE, tp 2", MIXTRAL, Ranks(2), 2.02),
)
"""Outside torch before profiling, vLLM 0.19 on H100."""


@dataclass(frozen=True)
class Row:
    """One prediction beside its log."""

    what: str
    name: str
    logged: float
    predicted: Estimate
    outlier: str

    @property
    def error(self) -> float:
        """In GiB."""
        return self.predicted.bytes / GIB - self.logged

    @property
    def within(self) -> bool:
        """Whether the log lies in the range, as far as it is rounded."""
        return self.predicted.low / GIB - 0.005 <= self.logged <= self.predicted.high / GIB + 0.005


def rows() -> Iterator[Row]:
    """All predictions, in the order of the logs."""
    for log in LOGS:
        split = f" tp{log.tp}" * (log.tp > 1) + f" pp{log.pp}" * (log.pp > 1)
        name = f"{log.model.name}{split}, {log.engine} {log.version}"
        kind = "MoE" if log.model.experts is not None else "image input" if log.image else "dense"
        kind = "NPU" if log.engine == "vllm-ascend" else kind
        yield Row(f"activations, {kind}", name, log.activations, log.predicted_activations(), log.outlier)
        if log.non_torch is not None:
            where = "NPU" if kind == "NPU" else f"{'several ranks' if log.tp > 1 else 'one rank'}"
            yield Row(f"non-torch, {where}", name, log.non_torch, log.predicted_non_torch(), "")
        if log.graphs is not None:
            yield Row(f"graphs, {kind}", name, log.graphs, log.predicted_graphs(), "")
        if log.kv is not None:
            yield Row(f"KV, {kind}", name, log.kv, log.predicted_kv(), "")
    rules = engine_rules("vllm", "0.19")
    for name, model, ranks, logged in CONTEXTS:
        yield Row("context", name, logged, context(rules, model, H100, ranks), "")


def summary(all_rows: list[Row]) -> Iterator[tuple[str, int, float, float, float, float, int]]:
    """Of each kind: points, mean and worst error in GiB, mean and worst in per cent, how many lie in their range."""
    for what in dict.fromkeys(row.what for row in all_rows):
        own = [row for row in all_rows if row.what == what and not row.outlier]
        shares = [abs(row.error) / row.logged for row in own if row.logged] or [nan]
        sizes = [abs(row.error) for row in own]
        yield (
            what,
            len(own),
            mean(sizes),
            max(sizes),
            100 * mean(shares),
            100 * max(shares),
            sum(row.within for row in own),
        )


def table() -> Iterator[str]:
    """The errors of each kind as rows of docs/overheads.md."""
    for what, points, size, worst, share, worst_share, within in summary(list(rows())):
        shares = ("-", "-") if share != share else (f"{share:.1f}", f"{worst_share:.1f}")
        yield f"| {what} | {points} | {size:.3f} | {worst:.2f} | {shares[0]} | {shares[1]} | {within} |"


def main() -> None:
    """Print every row, then the errors of each kind."""
    all_rows = list(rows())
    for row in all_rows:
        note = f"   left out: {row.outlier}" if row.outlier else "" if row.within else "   outside its range"
        low, high = row.predicted.low / GIB, row.predicted.high / GIB
        print(
            f"{row.what:<26}{row.name:<44}{row.logged:6.2f}{row.predicted.bytes / GIB:7.2f}"
            f"  ({low:.2f} to {high:.2f}){note}"
        )
    print(f"\n{'':<26}{'points':>7}{'mean GiB':>10}{'worst':>7}{'mean %':>8}{'worst':>7}{'in range':>10}")
    for what, points, size, worst, share, worst_share, within in summary(all_rows):
        print(f"{what:<26}{points:>7}{size:>10.3f}{worst:>7.2f}{share:>8.1f}{worst_share:>7.1f}{within:>10}")


if __name__ == "__main__":
    main()

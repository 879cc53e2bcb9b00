"""How well a CPU's profile predicts: kernels held back, those of another model, and steps of a decoder that serves.

    python benchmarks/kernels_cpu.py [BENCH.json] [--out BENCH.json]

Times the full grid (a minute or two; a file of ``hbmtwin bench kernels`` takes its place), calibrates, times kernels of
sizes that no grid has, simulates a run of a decoder with random weights on those figures, and serves its schedule step
by step. Needs torch. On a machine that others use the medians stand, and the worst steps are theirs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hbmtwin.kernels.attention.backends import kernels_for, load
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.sim import catalog
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.validation.bench.grid import grid_of, read_grid
from hbmtwin.validation.bench.kernels import run_bench, timer_of
from hbmtwin.validation.bench.records import Bench, read_bench
from hbmtwin.validation.calibrate.calibration import CPU, OpErrors, calibrate, errors, fit, predict, usable
from hbmtwin.validation.run_replay.errors import error_row
from hbmtwin.validation.small_decoder import SmallDecoder, serve

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
HEADS = {"num_heads": 12, "num_kv_heads": 4, "head_dim": 64}
LAYER = {"hidden_size": 768, "intermediate_size": 2048, **HEADS}
TOKENS, BATCH, CONTEXT = [3, 12, 48, 200], [3, 6, 12], [100, 700, 1500]
OTHER_SIZES = [
    {"op": "matmul", "tokens": TOKENS, "out_features": [1280, 4096], "in_features": 768},
    {"op": "matmul", "tokens": TOKENS, "out_features": 768, "in_features": 2048},
    {"op": "layer", "tokens": TOKENS, **LAYER},
    {"op": "prefill", "batch": [1, 3], "new_tokens": [48, 200, 400], "context_tokens": [0, 300], **HEADS},
    {"op": "paged_decode", "batch": BATCH, "context_tokens": CONTEXT, "block_size": 16, **HEADS},
    {"op": "step", "batch": BATCH, "context_tokens": CONTEXT, "block_size": 16, "num_layers": 4, "vocab_size": 8192}
    | LAYER,
]
"""Of a model that no grid has: nothing of it is fitted."""
TRAFFIC = {
    "device.name": "a100-80gb",  # for its memory; times are those of the CPU's profile
    "engine.max_model_len": 2048,
    "scheduler.max_num_batched_tokens": 256,
    "scheduler.max_num_seqs": 8,
    "kv_cache.block_size": 16,
    "workload.users": 8,
    "workload.num_prompts": 24,
    "workload.prompt_tokens": {"distribution": "uniform", "low": 32, "high": 600},
    "workload.output_tokens": {"distribution": "uniform", "low": 8, "high": 40},
    "results.steps": True,
}


def measured(arguments: list[str]) -> Bench:
    """The times of a file, or of this machine now."""
    files = [argument for argument in arguments if not argument.startswith("--")]
    if "--out" not in arguments and files:
        return read_bench(Path(files[0]))
    bench = run_bench(grid_of("full", "cpu"), "cpu", threads=1)
    if files:
        Path(files[0]).write_text(bench.to_json(), encoding="utf-8")
    return bench


def print_errors(rows: Sequence[OpErrors]) -> None:
    """A line for each op."""
    for row in rows:
        print(f"  {row.op:14}{row.points:5}  MAPE {row.mape_percent:5.1f} %  p50 {row.p50_percent:5.1f} %  p95 "
              f"{row.p95_percent:5.1f} %  worst {row.worst_percent:4.0f} %: {row.worst}")  # fmt: skip


def main(arguments: list[str]) -> int:
    """Print three tables: two by kernel, and one by kind of step."""
    torch = load("cpu")
    torch.set_num_threads(1)
    bench = measured(arguments)
    done = calibrate(bench, name="here", made="now")
    print(f"kernels at sizes held back: {done.profile.cross_validated_percent} % off in the mean")
    print_errors(done.cross_validated)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "grid.json").write_text(json.dumps(OTHER_SIZES))
        others = run_bench(read_grid(Path(folder) / "grid.json"), "cpu", threads=1)
        fitted = fit(usable(bench)[0], bench.dtype_bytes)
        rows = errors(others.points, predict(fitted, others.points, others.dtype_bytes))
        mean = sum(row.mape_percent * row.points for row in rows) / len(others.points)
        print(f"kernels of another model: {mean:.1f} % off in the mean")
        print_errors(rows)
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        name = str(Path(folder) / "config.json")
        model = catalog.model(name)
        token_bytes = model.num_layers * 2 * model.num_kv_heads * model.head_dim * model.dtype_bytes
        cost = RooflineCost(model, done.profile.applied_to(CPU), kv_token_bytes=token_bytes)
        result = Twin(Scenario.of(TRAFFIC | {"model.name": name}), cost=cost).run()
    assert result.steps is not None
    decoder = SmallDecoder(model, kernels_for("cpu"), dtype="bfloat16", num_blocks=1200, block_size=16, seed=0)
    with torch.inference_mode():
        served = serve(decoder, result.steps, timer_of(torch, "cpu"))
    predicted = [cost.steps(batch).first_ns for batch in served.batches]
    kinds = [("mixed" if b.decode_count else "prefill") if b.prefill else "decode" for b in served.batches]
    print(f"steps of a decoder of {model.num_layers} layers, served as simulated ({cost.basis}):")
    for kind in ("decode", "mixed", "prefill", "all"):
        own = [i for i, k in enumerate(kinds) if kind in (k, "all")]
        steps, ours, theirs = ([column[i] for i in own] for column in (served.steps, predicted, served.measured_ns))
        row = error_row(kind, steps, ours, theirs)
        print(f"  {kind:14}{row.steps:5}  MAPE {row.mape_percent:5.1f} %  p50 {row.p50_percent:5.1f} %  p95 "
              f"{row.p95_percent:5.1f} %  sum {sum(ours) / 1e9:.3f} of {sum(theirs) / 1e9:.3f} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Which cases a kernel benchmark measures: grids by name, and those of a file.

::

    [{"op": "matmul", "tokens": [1, 16, 256], "out_features": 4096, "in_features": [1024, 4096]},    6 cases
     {"op": "decode", "batch": [1, 8], "context_tokens": 1024, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}]

A list of values stands for a case each, with every other list: their product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hbmtwin.kernels.checked_json import MAX_FILE_BYTES, JsonRefused, parse_json, short
from hbmtwin.validation.bench.records import COLLECTIVES, OPS, BenchError, Case, Op, case

MAX_CASES = 10_000
MAX_STEP_TOKENS = 1 << 17
"""Of all sequences of a step in a named grid: each layer has their KV."""
MESSAGE_HIDDEN = {"cpu": 1024, "cuda": 4096, "npu": 4096}
"""Of the hidden states that a named grid of collectives sends."""
KERNELS = tuple(op for op in OPS if op not in COLLECTIVES)
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def _sizes(low: int, high: int, step: int = 1) -> list[int]:
    return [n for n in _POWERS if low <= n <= high][::step]


def _heads(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def _layer(hidden: int, intermediate: int, heads: Mapping[str, int]) -> dict[str, int]:
    return {"hidden_size": hidden, "intermediate_size": intermediate, **heads}


_CPU_HEADS = (_heads(8, 2, 64), _heads(16, 4, 64))
_CPU_LAYERS = (_layer(512, 1408, _CPU_HEADS[0]), _layer(1024, 2816, _CPU_HEADS[1]))
_HEADS = (_heads(32, 8, 128), _heads(28, 4, 128))
_LAYERS = (_layer(4096, 14336, _HEADS[0]), _layer(3584, 18944, _HEADS[1]))


def _grid(
    layers: tuple[dict[str, int], ...],
    heads: tuple[dict[str, int], ...],
    *,
    copies: list[int],
    tokens: list[int],
    batch: list[int],
    contexts: list[int],
    prompts: list[int],
    block_size: int,
    num_layers: list[int],
    vocab_size: int,
) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [{"op": "copy", "bytes": copies}]
    for one in layers:
        hidden, wide, n = one["hidden_size"], one["intermediate_size"], one["head_dim"]
        qkv = (one["num_heads"] + 2 * one["num_kv_heads"]) * n
        matrices = ((qkv, hidden), (hidden, one["num_heads"] * n), (2 * wide, hidden), (hidden, wide))
        entries += [
            {"op": "matmul", "tokens": tokens, "out_features": rows, "in_features": columns}
            for rows, columns in matrices
        ]
        entries.append({"op": "layer", "tokens": tokens, **one})
        lengths = contexts[:: max(1, len(contexts) // 3)]
        for depth, sequences in product(num_layers, batch):  # those of one decoder in a row: it is made once
            decoder = {"num_layers": depth, "vocab_size": vocab_size, "block_size": block_size, **one}
            fitting = [length for length in lengths if sequences * length <= MAX_STEP_TOKENS]
            entries.append({"op": "step", **decoder, "batch": sequences, "context_tokens": fitting})
    for one in heads:
        decode = {"batch": batch, "context_tokens": contexts, **one}
        entries.append({"op": "decode", **decode})
        entries.append({"op": "paged_decode", **decode, "block_size": block_size})
        entries.append({"op": "prefill", "batch": 1, "new_tokens": prompts, "context_tokens": 0, **one})
        chunk = {"new_tokens": prompts[: len(prompts) // 2 + 1], "context_tokens": contexts[len(contexts) // 2]}
        entries.append({"op": "prefill", "batch": [1, 4], **chunk, **one})
    return entries


def _cpu(step: int) -> list[dict[str, Any]]:
    return _grid(
        _CPU_LAYERS[: 3 - step],
        _CPU_HEADS[: 3 - step],
        copies=[64 << 20, 128 << 20],
        tokens=_sizes(1, 512, step),
        batch=_sizes(1, 16, step),
        contexts=_sizes(64, 2048, step),
        prompts=_sizes(32, 1024, step),
        block_size=16,
        num_layers=[2, 6],
        vocab_size=8192,
    )


def _accelerator(step: int, block_size: int) -> list[dict[str, Any]]:
    return _grid(
        _LAYERS[: 3 - step],
        _HEADS[: 3 - step],
        copies=[256 << 20, 1 << 30],
        tokens=_sizes(1, 8192, step),
        batch=_sizes(1, 64, step),
        contexts=_sizes(256, 16384, step),
        prompts=_sizes(128, 8192, step),
        block_size=block_size,
        num_layers=[2, 6],
        vocab_size=32_768,
    )


def grid_of(name: str, backend: str) -> tuple[Case, ...]:
    """The cases of ``small``, ``full`` or a file. Raise BenchError, OSError.

    On a CPU they are those of small decoders; ``small`` is every second size of one model, ``full`` all of two.
    """
    if name not in ("small", "full"):
        return read_grid(Path(name))
    step = 1 if name == "full" else 2
    entries = _cpu(step) if backend == "cpu" else _accelerator(step, 128 if backend == "npu" else 16)
    return tuple(dict.fromkeys(_cases(entries, name)))


def collectives_of(name: str, backend: str, ranks: Sequence[int], dtype_bytes: int) -> tuple[Case, ...]:
    """All-reduces of ``small``, ``full`` or a file, which tells its own ranks. Raise BenchError, OSError.

    Messages are those of a serving step, hidden states of 1 to some thousand tokens; ``small`` has every second.
    """
    if name not in ("small", "full"):
        return read_grid(Path(name), COLLECTIVES[:1])
    tokens = _sizes(1, 512 if backend == "cpu" else 8192, 1 if name == "full" else 2)
    sizes = [n * MESSAGE_HIDDEN[backend] * dtype_bytes for n in tokens]
    return tuple(dict.fromkeys(_cases([{"op": "all_reduce", "ranks": list(ranks), "bytes": sizes}], name, COLLECTIVES)))


def read_grid(path: Path, ops: Sequence[Op] = KERNELS) -> tuple[Case, ...]:
    """The cases of a file, each once; of these ops. Raise BenchError, OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    try:
        entries = parse_json(data)
    except JsonRefused as error:
        raise BenchError(f"{path}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise BenchError(f'{path}: a list of cases is wanted, [{{"op": ...}}, ...], not {short(entries)}')
    return tuple(dict.fromkeys(_cases(entries, str(path), ops)))


def _cases(entries: list[Any], where: str, ops: Sequence[Op] = KERNELS) -> Iterator[Case]:
    made = 0
    for place, entry in enumerate(entries):
        at = f"{where}: {place}"
        if not isinstance(entry, dict) or not isinstance(entry.get("op"), str):
            raise BenchError(f'{at}: an object with an "op" is wanted, not {short(entry)}')
        if entry["op"] in OPS and entry["op"] not in ops:
            verb = "collectives" if ops is KERNELS else "kernels"
            raise BenchError(f"{at}: {entry['op']} is timed by hbmtwin bench {verb}; here take {', '.join(ops)}")
        values = {key: value if isinstance(value, list) else [value] for key, value in entry.items() if key != "op"}
        for key, choices in values.items():
            if not choices or not all(isinstance(v, int) and not isinstance(v, bool) for v in choices):
                raise BenchError(f"{at}: {short(key)} is a whole number, or a list of them, not {short(entry[key])}")
        for chosen in product(*values.values()):
            made += 1
            if made > MAX_CASES:
                raise BenchError(f"{where}: more than {MAX_CASES:,} cases; take fewer sizes")
            yield case(entry["op"], dict(zip(values, chosen, strict=True)), at)

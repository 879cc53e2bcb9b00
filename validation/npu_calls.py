"""The calls of the NPU kernels beside the real torch_npu: what arguments its ops have, and what shapes they give.

::

    check_npu_calls()                                     python -P -m hbmtwin.validation.npu_calls FOLDER ANSWER
      builds the emulated driver, starts ---------------> imports torch_npu over it
                                                          every case --our kernels--> NpuCalls on meta tensors
                                                            names and types --the op's schema
                                                            shape and dtype --the op's meta kernel, where it has one
                                                            limits          --our validator
      CheckedCall for each, with its problems <---------- JSON

No kernel runs: neither numbers nor times are looked at, and the meta kernels take block sizes and dtypes that a device
refuses. Ops of ATB have no meta kernel, so of these names and types alone are known.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hbmtwin.kernels.attention.npu_call import NpuCall, namespace_of
from hbmtwin.kernels.attention.npu_validator import ARGUMENTS, check_call
from hbmtwin.kernels.attention.validator import KernelArgumentError
from hbmtwin.validation.emulated.build import Build, EmulatorUnavailable, build_emulator

WORKER = (sys.executable, "-P", "-m", "hbmtwin.validation.npu_calls")


class CheckedCall(NamedTuple):
    """One call and what the real torch_npu says of it."""

    case: str
    op: str
    meta: bool
    """Whether the op has a meta kernel, so that shape and dtype were compared."""
    problems: tuple[str, ...]


class NpuCallsReport(NamedTuple):
    """Every call, and what the table of argument names has otherwise than the schemas."""

    calls: tuple[CheckedCall, ...]
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    """Methods of the kernels whose result has another shape than the contract says."""
    at_hand: str
    """The name of what ``kernels_for("npu")`` gives on the emulated device, with its family."""
    planted: dict[str, tuple[CheckedCall, ...]]
    """The same calls with a mistake of :data:`PLANTED` in every one that has room for it."""


def check_npu_calls(planted: Sequence[str] = ()) -> NpuCallsReport:
    """Hold every call to the real torch_npu, in a process of its own: some seconds.

    *planted* names mistakes of :data:`PLANTED` to be tried besides. Raises EmulatorUnavailable where the machine, the
    wheels or a compiler are missing.
    """
    build = build_emulator()
    with tempfile.TemporaryDirectory(prefix="hbmtwin-calls-") as scratch:
        answer = Path(scratch) / "calls.json"
        done = subprocess.run(
            [*WORKER, str(build.folder), str(answer), *planted],
            env=os.environ | build.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if not answer.exists():
            raise EmulatorUnavailable(f"torch_npu could not be asked: {done.stderr.strip()[-2000:]}")
        found = json.loads(answer.read_text())
    by_mistake = {
        mistake: tuple(CheckedCall(case, op, meta, tuple(problems)) for case, op, meta, problems in calls)
        for mistake, calls in found["calls"].items()
    }
    calls = by_mistake.pop("")
    return NpuCallsReport(calls, tuple(found["names"]), tuple(found["outputs"]), found["at_hand"], by_mistake)


def _misspelt(call: NpuCall) -> NpuCall:
    renamed = {{"scale": "scale_value", "scale_value": "scale"}.get(k, k): v for k, v in call.arguments.items()}
    return call._replace(arguments=renamed)


def _plain_lens(call: NpuCall) -> NpuCall:
    """Lengths of a packed query as they are in the batch, not summed."""
    made = dict(call.arguments)
    for name in ("actual_seq_lengths", "actual_seq_qlen"):
        if made.get("input_layout") == "TND" and name in made:
            sums = made[name]
            made[name] = [high - low for low, high in zip([0, *sums], sums, strict=False)]
    return call._replace(arguments=made)


def _summed_context(call: NpuCall) -> NpuCall:
    """Lengths of a paged cache summed as if they were packed."""
    made = dict(call.arguments)
    for name in ("actual_seq_lengths_kv", "actual_seq_kvlen"):
        if "block_table" in made and name in made:
            made[name] = [sum(made[name][: i + 1]) for i in range(len(made[name]))]
    return call._replace(arguments=made)


def _wrong_layout(call: NpuCall) -> NpuCall:
    swapped = {"BSND": "BNSD", "BNSD": "BSND", "TND": "NTD_TND"}
    layout = call.arguments.get("input_layout")
    return call._replace(arguments=call.arguments | {"input_layout": swapped[layout]}) if layout else call


def _tensor_lens(call: NpuCall) -> NpuCall:
    """Lengths as a tensor, as another library takes them."""
    import torch

    made = dict(call.arguments)
    for name in ("actual_seq_lengths_kv", "actual_seq_kvlen", "actual_seq_lengths"):
        if isinstance(made.get(name), list):
            made[name] = torch.tensor(made[name])
    return call._replace(arguments=made)


PLANTED: dict[str, Callable[[NpuCall], NpuCall]] = {
    "misspelt": _misspelt,
    "plain-lens": _plain_lens,
    "summed-context": _summed_context,
    "wrong-layout": _wrong_layout,
    "tensor-lens": _tensor_lens,
}
"""Mistakes that the harness must catch: its tests make them on purpose."""


def main() -> None:
    """Write the answer. Arguments: the folder of the build, the file of the answer, mistakes to be planted."""
    folder, answer, *planted = sys.argv[1:]
    build = Build(Path(folder))
    driver, *_ = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in build.libraries]
    driver.hbmtwin_set_cann(b"9.0.0")
    import torch
    import torch_npu

    assert torch_npu is not None
    from hbmtwin.kernels.attention.backends import kernels_for
    from hbmtwin.validation.emulated.real_allocator import EmulatedDriver
    from hbmtwin.validation.emulated.records import NpuSettings
    from hbmtwin.validation.npu_cases import calls, outputs

    torch.set_num_threads(1)
    EmulatedDriver(driver).configure(NpuSettings())
    found: dict[str, list[tuple[str, str, bool, list[str]]]] = {mistake: [] for mistake in ("", *planted)}
    for case, family, call in calls():
        for mistake, checked in found.items():
            made = PLANTED[mistake](call) if mistake else call
            checked.append((case, call.op, _has_meta(call.op), list(_problems(made, family))))
    here: Any = kernels_for("npu")
    report = {
        "calls": found,
        "names": list(_names()),
        "outputs": list(outputs()),
        "at_hand": f"{here.name} {here.family}",
    }
    Path(answer).write_text(json.dumps(report))
    os._exit(0)  # nothing of torch_npu's is worth waiting for


def _schema(op: str) -> Any:
    import torch

    schemas = torch._C._jit_get_schemas_for_operator(f"{namespace_of(op)}::{op}")
    return next(schema for schema in schemas if not schema.overload_name)


def _has_meta(op: str) -> bool:
    import torch

    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace_of(op)}::{op}", "Meta"))


def _names() -> Iterator[str]:
    """Where our table of argument names and the schemas differ; reserved ones ending in ``_dtype`` are left out."""
    for op, ours in ARGUMENTS.items():
        reserved = op.endswith("_v2")
        theirs = {a.name for a in _schema(op).arguments if not (reserved and a.name.endswith("_dtype"))}
        yield from (f"{op}: {name} is not in ours" for name in sorted(theirs - ours))
        yield from (f"{op}: {name} is not in the schema" for name in sorted(ours - theirs))


def _problems(call: NpuCall, family: str) -> Iterator[str]:
    schema = {argument.name: argument for argument in _schema(call.op).arguments}
    for name, value in call.arguments.items():
        if name not in schema:
            yield f"schema: no argument {name}"
        elif not _is_a(value, str(schema[name].type)):
            yield f"schema: {name} is a {type(value).__name__}, not {schema[name].type}"
    for name, argument in schema.items():
        if not argument.has_default_value() and name not in call.arguments:
            yield f"schema: {name} is missing"
    try:
        check_call(call.op, call.arguments, family=family)
    except KernelArgumentError as refused:
        yield f"validator: {refused}"
    if _has_meta(call.op):
        try:
            made = call.run()
        except (RuntimeError, TypeError, IndexError) as refused:
            yield f"meta: {str(refused).splitlines()[0]}"
        else:
            yield from _unlike(call, made)


def _unlike(call: NpuCall, made: Any) -> Iterator[str]:
    if not call.shape:
        if made is not None:
            yield "meta: gives something, and ours is to write in place"
        return
    if tuple(made.shape) != call.shape:
        yield f"meta: shape {tuple(made.shape)}, and ours counts on {call.shape}"
    if "query" in call.arguments and made.dtype != call.arguments["query"].dtype:
        yield f"meta: dtype {made.dtype}"


def _is_a(value: Any, kind: str) -> bool:
    """Whether the value is of the kind that a schema names."""
    if kind.startswith("Optional["):
        kind = kind.removeprefix("Optional[").removesuffix("]")
    if kind == "Tensor":
        return hasattr(value, "is_contiguous")
    if kind.startswith("List["):
        return isinstance(value, list) and all(type(item) is int for item in value)
    plain: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    return isinstance(value, plain[kind])


if __name__ == "__main__":
    main()

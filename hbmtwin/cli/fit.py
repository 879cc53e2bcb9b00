"""``hbmtwin fit``: will it start, what takes the memory, how many requests fit, and what would make it start."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hbmtwin.cli.exits import DOES_NOT_FIT, OK, UsageError
from hbmtwin.cli.options import Json
from hbmtwin.cli.output import json_text, stdout

if TYPE_CHECKING:
    from hbmtwin.sim.fit.report import Fit


class Language(StrEnum):
    """Of what is said to people."""

    EN = "en"
    ZH = "zh"


def _bytes(text: str) -> int:
    from hbmtwin.sim.sizes import parse_bytes

    return _read(parse_bytes, text)


def _tokens(text: str) -> int:
    from hbmtwin.sim.sizes import parse_count

    return -1 if text in ("auto", "-1") else _read(parse_count, text)


def _bytes_or_count(text: str) -> int:
    """Of a flag of vLLM, which has its own short forms (``25G``), beside ours."""
    from hbmtwin.sim.sizes import parse_bytes, parse_count

    try:
        return parse_count(text)
    except ValueError:
        return _read(parse_bytes, text)


def _read(parse: Callable[[str], Any], text: str) -> int:
    try:
        return int(parse(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


ENGINES = "vLLM's arguments"
OTHERS = "Other engines' names"
MEASURED = "Measured values of one rank, in place of estimates: 8708046192 or 8.11GiB"


class FitCommand(TyperCommand):
    """A command that takes vLLM's flags in its other spelling too: ``--max_model_len``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write names with hyphens, up to an equals sign."""
        spelt = []
        for arg in args:
            name, equals, value = arg.partition("=")
            spelt.append(name.replace("_", "-") + equals + value if name.startswith("--") else arg)
        return super().parse_args(ctx, spelt)


def _vllm(name: str, help_: str = "", *more: str, metavar: str | None = "N", **rest: Any) -> Any:
    return typer.Option(name, *more, help=help_, metavar=metavar, rich_help_panel=ENGINES, **rest)


def _switch(name: str, help_: str, *more: str) -> Any:
    return typer.Option(name, *more, help=help_, rich_help_panel=ENGINES)


def _off(name: str) -> Any:
    return typer.Option(name, hidden=True)


def _other(name: str, help_: str) -> Any:
    return typer.Option(name, help=help_, metavar="X", rich_help_panel=OTHERS)


def _bytes_of(name: str, help_: str) -> Any:
    return typer.Option(name, help=help_, parser=_bytes, metavar="BYTES", rich_help_panel=MEASURED)


def _size_of(name: str, help_: str) -> Any:
    return typer.Option(name, help=help_, metavar="N", rich_help_panel=MEASURED)


def fit(
    scenario: Annotated[
        Path | None,
        typer.Argument(metavar="[SCENARIO]", help="Scenario file (TOML) whose model, device and settings stand."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Catalog id, id at Hugging Face, or path of a config.json.", metavar="NAME")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Catalog id, e.g. ascend-910b4.", metavar="NAME")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="vllm, vllm-ascend, sglang, mindie, tensorrt-llm; default: by device.", metavar="NAME"),
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="Its release, e.g. 0.18; default: the newest known.", metavar="VERSION")
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, _vllm("--tensor-parallel-size", "Ranks that share each layer.", "-tp")
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, _vllm("--pipeline-parallel-size", "Stages with layers of their own.", "-pp")
    ] = None,
    data_parallel_size: Annotated[
        int | None, _vllm("--data-parallel-size", "Replicas; they may share experts.", "-dp")
    ] = None,
    enable_expert_parallel: Annotated[
        bool | None, _switch("--enable-expert-parallel", "Whole experts on each rank.", "-ep")
    ] = None,
    max_model_len: Annotated[
        int | None,
        _vllm("--max-model-len", "Prompt and answer: 32768, 32k; auto: what fits.", metavar="TOKENS", parser=_tokens),
    ] = None,
    max_num_seqs: Annotated[int | None, _vllm("--max-num-seqs", "Most requests that run at once.")] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        _vllm("--max-num-batched-tokens", "Most tokens of one step.", metavar="TOKENS", parser=_tokens),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, _vllm("--gpu-memory-utilization", "Share of the device.", metavar="X")
    ] = None,
    block_size: Annotated[int | None, _vllm("--block-size", "Tokens of a KV block.")] = None,
    dtype: Annotated[str | None, _vllm("--dtype", "Of computing: float16, bfloat16, float32.", metavar="DTYPE")] = None,
    kv_cache_dtype: Annotated[
        str | None, _vllm("--kv-cache-dtype", "Of the KV cache: fp8, int8 ...", metavar="DTYPE")
    ] = None,
    quantization: Annotated[
        str | None, _vllm("--quantization", "Of the weights: fp8, ascend, awq, gptq.", "-q", metavar="METHOD")
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None, _switch("--enable-prefix-caching", "Off: --no-enable-prefix-caching.")
    ] = None,
    no_enable_prefix_caching: Annotated[bool, _off("--no-enable-prefix-caching")] = False,
    enable_chunked_prefill: Annotated[
        bool | None, _switch("--enable-chunked-prefill", "Off: --no-enable-chunked-prefill.")
    ] = None,
    no_enable_chunked_prefill: Annotated[bool, _off("--no-enable-chunked-prefill")] = False,
    enforce_eager: Annotated[bool | None, _switch("--enforce-eager", "No graphs.")] = None,
    no_enforce_eager: Annotated[bool, _off("--no-enforce-eager")] = False,
    kv_cache_memory_bytes: Annotated[
        int | None,
        _vllm("--kv-cache-memory-bytes", "For KV, whatever is left.", metavar="BYTES", parser=_bytes_or_count),
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None, _vllm("--num-gpu-blocks-override", "Blocks, whatever is left.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, _vllm("--num-speculative-tokens", "Drafts a step, for each sequence.")
    ] = None,
    mem_fraction_static: Annotated[
        float | None, _other("--mem-fraction-static", "SGLang: share for weights and KV.")
    ] = None,
    free_gpu_memory_fraction: Annotated[
        float | None, _other("--free-gpu-memory-fraction", "TensorRT-LLM: share for KV of what is left.")
    ] = None,
    npu_mem_size: Annotated[
        float | None, _other("--npu-mem-size", "MindIE's npuMemSize: GiB for KV; -1: automatic.")
    ] = None,
    total_memory_bytes: Annotated[int | None, _bytes_of("--total-memory-bytes", "Of the device.")] = None,
    available_kv_bytes: Annotated[
        int | None, _bytes_of("--available-kv-bytes", "Left for KV, as the engine logs it.")
    ] = None,
    weights_bytes: Annotated[int | None, _bytes_of("--weights-bytes", "Once loaded.")] = None,
    activation_bytes: Annotated[int | None, _bytes_of("--activation-bytes", "Peak of the profiling run.")] = None,
    non_torch_bytes: Annotated[int | None, _bytes_of("--non-torch-bytes", "Of libraries, in the same run.")] = None,
    graph_bytes: Annotated[int | None, _bytes_of("--graph-bytes", "Of captured graphs.")] = None,
    other_tenant_bytes: Annotated[int | None, _bytes_of("--other-tenant-bytes", "Of other processes.")] = None,
    kv_bytes_per_token: Annotated[int | None, _bytes_of("--kv-bytes-per-token", "In all layers.")] = None,
    num_layers: Annotated[int | None, _size_of("--num-layers", "Of a model that is not at hand.")] = None,
    num_kv_heads: Annotated[int | None, _size_of("--num-kv-heads", "Of it.")] = None,
    head_dim: Annotated[int | None, _size_of("--head-dim", "Of it.")] = None,
    lang: Annotated[Language, typer.Option(help="Language of what is printed.")] = Language.EN,
    json_: Json = False,
) -> int:
    """Say whether a server starts, what takes its memory, how many requests fit, and what would make it start."""
    options = {name: value for name, value in locals().items() if value is not None}
    answer = _answer(_as_options(options))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without Chinese letters gets their numbers, as in JSON
        sys.stdout.reconfigure(errors="backslashreplace")
    if json_:
        print(json_text(answer.to_dict(lang.value)))
    else:
        from hbmtwin.cli.fit_screen import FitScreen

        FitScreen(stdout(), lang.value).show(answer)
    return OK if answer.fits else DOES_NOT_FIT


def _as_options(given: dict[str, Any]) -> dict[str, Any]:
    """Without those of the command line itself, and a ``no_`` as the value of what it turns off."""
    off = {name: given.pop(f"no_{name}") for name in SWITCHES}
    turned_off = {name: False for name, said in off.items() if said}
    for name in turned_off:
        if name in given:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} and --no-{flag}: one undoes the other; leave one out")
    return {name: value for name, value in given.items() if name not in ("lang", "json_")} | turned_off


SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager")


def _answer(said: dict[str, Any]) -> Fit:
    """Not by way of :mod:`hbmtwin.api`, which imports the simulator, and with it pandas."""
    from hbmtwin.sim.catalog.errors import CatalogError
    from hbmtwin.sim.fit.fit import fit as ask
    from hbmtwin.sim.fit.options import FitError

    try:
        return ask(**said)
    except (FitError, CatalogError) as error:
        raise UsageError(str(error)) from None

"""``hbmtwin fit``: will it start, what takes the memory, how many requests fit, and what would make it start."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hbmtwin.cli.exits import DOES_NOT_FIT, OK, UsageError
from hbmtwin.cli.options import Json
from hbmtwin.cli.output import json_text, stdout

if TYPE_CHECKING:
    from hbmtwin.sim.fit_report import Fit


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
OTHERS = "The same of other engines"
MEASURED = "Measured values, each in place of an estimate (bytes of one rank: 8709734400, 8.11GiB)"

Bytes = Annotated[int | None, typer.Option(parser=_bytes, metavar="BYTES", rich_help_panel=MEASURED)]


def _vllm(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=ENGINES, **more)


def _other(help_: str) -> Any:
    return typer.Option(rich_help_panel=OTHERS, help=help_)


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
        typer.Option(help="vllm, vllm-ascend, sglang, mindie or tensorrt-llm; default: by the device.", metavar="NAME"),
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="Its release, e.g. 0.18; default: the newest known.", metavar="VERSION")
    ] = None,
    tensor_parallel_size: Annotated[int | None, _vllm("--tensor-parallel-size", "-tp")] = None,
    pipeline_parallel_size: Annotated[int | None, _vllm("--pipeline-parallel-size", "-pp")] = None,
    data_parallel_size: Annotated[int | None, _vllm("--data-parallel-size", "-dp")] = None,
    enable_expert_parallel: Annotated[
        bool | None, _vllm("--enable-expert-parallel/--no-enable-expert-parallel", "-ep")
    ] = None,
    max_model_len: Annotated[
        int | None,
        _vllm("--max-model-len", parser=_tokens, metavar="TOKENS", help="Prompt and answer together; auto: what fits."),
    ] = None,
    max_num_seqs: Annotated[int | None, _vllm("--max-num-seqs")] = None,
    max_num_batched_tokens: Annotated[
        int | None, _vllm("--max-num-batched-tokens", parser=_tokens, metavar="TOKENS")
    ] = None,
    gpu_memory_utilization: Annotated[float | None, _vllm("--gpu-memory-utilization")] = None,
    block_size: Annotated[int | None, _vllm("--block-size")] = None,
    kv_cache_dtype: Annotated[str | None, _vllm("--kv-cache-dtype", metavar="DTYPE")] = None,
    quantization: Annotated[
        str | None, _vllm("--quantization", "-q", metavar="METHOD", help="Of the weights: fp8, ascend, awq, ...")
    ] = None,
    enable_prefix_caching: Annotated[bool | None, _vllm("--enable-prefix-caching/--no-enable-prefix-caching")] = None,
    enable_chunked_prefill: Annotated[
        bool | None, _vllm("--enable-chunked-prefill/--no-enable-chunked-prefill")
    ] = None,
    enforce_eager: Annotated[bool | None, _vllm("--enforce-eager/--no-enforce-eager")] = None,
    kv_cache_memory_bytes: Annotated[
        int | None, _vllm("--kv-cache-memory-bytes", parser=_bytes_or_count, metavar="BYTES")
    ] = None,
    num_gpu_blocks_override: Annotated[int | None, _vllm("--num-gpu-blocks-override")] = None,
    num_speculative_tokens: Annotated[int | None, _vllm("--num-speculative-tokens")] = None,
    mem_fraction_static: Annotated[float | None, _other("SGLang: share for weights and KV.")] = None,
    free_gpu_memory_fraction: Annotated[float | None, _other("TensorRT-LLM: share for KV of what is left.")] = None,
    npu_mem_size: Annotated[float | None, _other("MindIE's npuMemSize: GiB for KV; -1: automatic.")] = None,
    total_memory_bytes: Bytes = None,
    available_kv_bytes: Bytes = None,
    weights_bytes: Bytes = None,
    activation_bytes: Bytes = None,
    non_torch_bytes: Bytes = None,
    graph_bytes: Bytes = None,
    other_tenant_bytes: Bytes = None,
    kv_bytes_per_token: Bytes = None,
    num_layers: Annotated[int | None, typer.Option(rich_help_panel=MEASURED)] = None,
    num_kv_heads: Annotated[int | None, typer.Option(rich_help_panel=MEASURED)] = None,
    head_dim: Annotated[int | None, typer.Option(rich_help_panel=MEASURED)] = None,
    lang: Annotated[Language, typer.Option(help="Language of what is printed.")] = Language.EN,
    json_: Json = False,
) -> int:
    """Say whether a server starts, what takes the memory, how many requests fit, and what would make it start."""
    said = {name: value for name, value in locals().items() if value is not None and name not in ("lang", "json_")}
    answer = _answer(said)
    if json_:
        print(json_text(answer.to_dict(lang.value)))
    else:
        from hbmtwin.cli.fit_screen import FitScreen

        FitScreen(stdout(), lang.value).show(answer)
    return OK if answer.fits else DOES_NOT_FIT


def _answer(said: dict[str, Any]) -> Fit:
    """Not by way of :mod:`hbmtwin.api`, which imports the simulator, and with it pandas."""
    from hbmtwin.sim.catalog.errors import CatalogError
    from hbmtwin.sim.fit import fit as ask
    from hbmtwin.sim.fit_options import FitError

    try:
        return ask(**said)
    except (FitError, CatalogError) as error:
        raise UsageError(str(error)) from None

"""OOM points and smallest memories of two services: ``python examples/oom_points [--traces DIR] [--docs DIR] OUT``.

With ``--traces`` windows of the traces in DIR are replayed (AzureLLMInferenceTrace_conv.csv, conversation_trace.jsonl;
see SERVICES for other names). Without, the presets azure-conv and mooncake-conversation stand for them, and seeds for
windows. What has run is in OUT, and does not run again. ``--docs docs`` draws the pictures of docs/oom-points.md anew,
and writes its figures.
"""

from __future__ import annotations

import gzip
import signal
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go

from hbmtwin import OomPoint, oom_point, parse_load
from hbmtwin.dashboard.oom_point_figure import memory_by_load_figure, share_by_load
from hbmtwin.dashboard.oom_point_file import write_oom_point
from hbmtwin.dashboard.oom_point_page import write_oom_point_page
from hbmtwin.dashboard.oom_point_words import headline, memory_plan, sentences
from hbmtwin.sim.sweep.execute import run_each
from hbmtwin.sim.sweep.store import RunStore

HERE = Path(__file__).parent
USAGE = "usage: python examples/oom_points [--traces DIR] [--docs DIR] OUT"
DRAWS, MEMORY_DRAWS = 6, 3
MARK = "<!-- written by examples/oom_points -->\n"
ALT = {
    "load": "Share of draws of {} that ran out of memory, against the load, a panel each policy",
    "memory": "Smallest device memory on which draws of {} are served, against the load",
}
LINES = 2_500
"""Of a trace, so that no run reads an hour of traffic to find its minutes."""


class Service(NamedTuple):
    """A scenario file, its trace and its preset, and how the load on each grows."""

    name: str
    title: str
    traces: tuple[str, ...]
    """Names of the file, as they are published or kept here."""
    settings: tuple[str, ...]
    """That go with the trace."""
    scales: str
    few_scales: str
    """For the smallest memories."""
    rates: str
    few_rates: str


SERVICES = (
    Service(
        "azure",
        "Short chats: Azure 2023, CodeLlama-7B on a 32 GB 910B4",
        ("azure2023_conv.csv.gz", "AzureLLMInferenceTrace_conv.csv"),
        (),
        "rate_scale=0.05:1.3:x1.5",
        "rate_scale=0.05,0.15,0.45,1.3",
        "request_rate=0.3:8:x1.5",
        "request_rate=0.3,0.9,2.7,8",
    ),
    Service(
        "mooncake",
        "Long histories: Mooncake, Llama-3.1-8B on a 64 GB 910B2",
        ("mooncake_fast25_conversation.jsonl.gz", "conversation_trace.jsonl"),
        ("workload.trace_jitter=true",),
        "rate_scale=0.01:0.64:x1.6",
        "rate_scale=0.01,0.04,0.16,0.64",
        "request_rate=0.02:1.3:x1.6",
        "request_rate=0.02,0.08,0.32,1.3",
    ),
)


def main(arguments: list[str]) -> int:
    """Run both services, print the sentences, write pages and tables below OUT."""
    rest = list(arguments)
    traces, docs = (_taken(rest, name) for name in ("--traces", "--docs"))
    if len(rest) != 1 or rest[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    out = Path(rest[0])
    told: list[str] = []
    for service in SERVICES:
        try:
            settings = _traffic(service, traces, out)
        except FileNotFoundError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        loads, few = (service.scales, service.few_scales) if traces else (service.rates, service.few_rates)
        point = study(out / service.name, service, settings, loads, DRAWS, memory=False)
        print("\n  ".join([service.name, *sentences(point)]))
        load = section(docs, service, "load", share_by_load(point), [f"{headline(point)}.", *sentences(point)])
        told += [f"### {service.title}\n", load]
        memory = study(out / f"{service.name}-memory", service, settings, few, MEMORY_DRAWS, memory=True)
        print(f"  {memory_plan(memory)}")
        told.append(section(docs, service, "memory", memory_by_load_figure(memory), [memory_plan(memory)]))
        if docs is not None:
            renew(docs, told)
    return 0


def section(docs: Path | None, service: Service, kind: str, figure: go.Figure, said: list[str]) -> str:
    """A picture, drawn into *docs*, and what it says, as Markdown."""
    name = f"oom-point-{service.name}-{kind}.png"
    if docs is not None:
        figure.update_layout(width=1100)
        figure.write_image(docs / name)
    return "\n".join([f"![{ALT[kind].format(service.name)}]({name})\n", *(f"- {line}" for line in said), ""])


def renew(docs: Path, told: list[str]) -> None:
    """Write the sections between the marks of the page."""
    page = docs / "oom-points.md"
    before, _, after = page.read_text(encoding="utf-8").split(MARK)
    parts = "".join(f"{part}\n" for part in told)
    page.write_text(f"{before}{MARK}\n{parts}{MARK}{after}", encoding="utf-8")


def _taken(rest: list[str], name: str) -> Path | None:
    """Take an option and its value out of the arguments."""
    if name not in rest[:-1]:
        return None
    place = rest.index(name)
    value = Path(rest[place + 1])
    del rest[place : place + 2]
    return value


def study(out: Path, service: Service, settings: list[str], load: str, draws: int, *, memory: bool) -> OomPoint:
    """Find the OOM points of a service under all presets, and leave runs, tables and page in *out*."""
    with RunStore(out) as store:
        point = oom_point(
            HERE / f"{service.name}.toml",
            load=parse_load(load),
            seeds=draws,
            memory=memory,
            overrides=settings,
            call=partial(run_each, store=store),
        )
    write_oom_point(point, out)
    write_oom_point_page(point, out)
    return point


def _traffic(service: Service, traces: Path | None, out: Path) -> list[str]:
    """Settings for the first lines of the trace, which are copied to *out*; or for the preset."""
    if traces is None:
        return [f"workload.preset={service.name}{'-conversation' if service.name == 'mooncake' else '-conv'}"]
    found = next((traces / name for name in service.traces if (traces / name).exists()), None)
    if found is None:
        raise FileNotFoundError(f"{traces}: neither {' nor '.join(service.traces)} is there")
    kind = found.name.removesuffix(".gz").rpartition(".")[2]
    cut = out / f"{service.name}-cut.{kind}"
    out.mkdir(parents=True, exist_ok=True)
    with gzip.open(found, "rt") if found.suffix == ".gz" else found.open() as lines:
        cut.write_text("".join(islice(lines, LINES)), encoding="utf-8")
    return [f"workload.trace={cut}", *service.settings]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that joblib ends its workers
    sys.exit(main(sys.argv[1:]))

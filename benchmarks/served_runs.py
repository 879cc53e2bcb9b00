"""Two recorded runs of vLLM against the simulator: figures from their logs, judged on their requests.

    python benchmarks/served_runs.py FOLDER [--png FILE]

FOLDER holds directories of recorded runs (meta.json, timeseries.csv, requests.jsonl). For each run it prints what its
log tells of the device, then the errors of its own traffic with figures from: the catalog, its log, the log's first 60
seconds, and each other run's log. ``--png`` draws running, waiting and generated tokens, measured and simulated.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.sim import catalog
from hbmtwin.sim.result import Result
from hbmtwin.validation.served_runs.fit import Fit, fit_intervals
from hbmtwin.validation.served_runs.replay import (
    AIMS,
    curve_errors,
    from_second,
    judged,
    measured_curves,
    measured_times,
    replay_run,
    simulated_curves,
    simulated_generation,
    simulated_times,
)
from hbmtwin.validation.served_runs.served_run import META, ServedRun, read_served_run

DEVICE = "rtx-pro-6000-server"
FIRST_S = 60.0
MEASURED, OWN, FIRST = "measured", "figures from its log", "from its first 60 s"
COLOURS = {MEASURED: "#222222", OWN: "#0072B2", FIRST: "#D55E00"}
HEADER = ("figures from", *AIMS, "running", "waiting")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    runs = [read_served_run(path.parent) for path in sorted(args.folder.glob(f"*/{META}"))]
    device = catalog.device(DEVICE)
    fits = {run.model: fit_of(run, device) for run in runs}
    drawn: dict[str, tuple[ServedRun, dict[str, Result]]] = {}
    for run in runs:
        print(f"\n{run.model}, vLLM {run.version}, {run.settings.ranks} x {DEVICE}")
        print_fit(fits[run.model], device)
        print("  " + "  ".join(f"{name:>21}" if name == HEADER[0] else f"{name:>10}" for name in HEADER))
        print_errors("(aim)", [f"{aim:.0%}" for aim in AIMS.values()])
        first = fit_of(run, device, FIRST_S)
        others = {f"log of {m.split('/')[-1][:14]}": f.device for m, f in fits.items() if m != run.model}
        results = {}
        for name, used in {"catalog": device, OWN: fits[run.model].device, FIRST: first.device, **others}.items():
            results[name] = result = replay_run(run, used)
            print_errors(name, errors_of(run, result))
        print_errors("- ended after 60 s", errors_of(run, results[FIRST], FIRST_S))
        print_first_tokens(run, results[OWN])
        drawn[run.model] = (run, results)
    if args.png:
        picture(drawn).write_image(args.png, width=1200, height=850)


def fit_of(run: ServedRun, device: DeviceSpec, until_s: float | None = None) -> Fit:
    """The fit to a run's log, or to its beginning, which does not know how many requests there will be."""
    model = catalog.model(run.model)
    if until_s is None:
        return fit_intervals(run.intervals, model, device, run.settings)
    seen = [i for i in run.intervals if i.end_s <= until_s]
    return fit_intervals(seen, model, device, replace(run.settings, num_requests=None))


def errors_of(run: ServedRun, result: Result, since_s: float = 0.0) -> list[str]:
    """Errors as text, with a star where the aim is missed."""
    measured, simulated = (
        from_second(times, since_s) for times in (measured_times(run.requests), simulated_times(result))
    )
    curves = measured_curves(run.intervals)
    apart = curve_errors(curves, simulated_curves(result, curves.end_s))
    found = [f"{one.error:+.1%}{'' if one.met else '*'}" for one in judged(measured, simulated).values()]
    return [*found, *(f"{error:.1%}" for error in apart.values())]


def print_errors(name: str, errors: list[str]) -> None:
    """One row."""
    print("  " + "  ".join((f"{name:>21}", *(f"{error:>10}" for error in errors))))


def print_fit(fit: Fit, device: DeviceSpec) -> None:
    """What the log tells of each figure."""
    for name, one in fit.figures.items():
        told = "told" if one.told else "not told apart"
        print(
            f"  {name:28} {one.value:12.4g}  catalog {getattr(device, name):10.4g}  "
            f"+-{one.deviation:.0%} (before +-{one.prior_deviation:.0%}), {told}"
        )
    left = 100 * float(np.median(np.abs(fit.residuals)))
    print(f"  {len(fit.residuals)} blocks, median residual {left:.1f} %, held back {fit.cross_validated_percent:.1f} %")


def print_first_tokens(run: ServedRun, result: Result) -> None:
    """Where requests do not queue: how long a first token takes from being scheduled, beside a step of the engine."""
    times, ours = measured_times(run.requests), simulated_times(result)
    soon = times.first_token - times.arrival < 1
    if soon.sum() < 30:
        return
    step = float(np.median([i.running / i.generated_tokens for i in run.intervals if i.generated_tokens and i.running]))
    gaps = [float(np.median((side.first_token - side.arrival)[soon])) for side in (times, ours)]
    print(
        f"  {soon.sum()} requests had their first token within 1 s: after {gaps[0] * 1e3:.0f} ms, simulated "
        f"{gaps[1] * 1e3:.0f} ms; a step takes {step * 1e3:.0f} ms"
    )


def picture(drawn: dict[str, tuple[ServedRun, dict[str, Result]]]) -> go.Figure:
    """A column a run; running, waiting and generated tokens below each other."""
    figure = make_subplots(rows=3, cols=len(drawn), shared_xaxes=True, vertical_spacing=0.05, column_titles=list(drawn))
    for col, (run, results) in enumerate(drawn.values(), 1):
        curves = measured_curves(run.intervals)
        generated = np.array([i.generated_tokens / i.seconds for i in run.intervals])
        rows = {MEASURED: (curves.running, curves.waiting, generated)}
        for name in (OWN, FIRST):
            ours = simulated_curves(results[name], curves.end_s)
            rows[name] = (ours.running, ours.waiting, simulated_generation(results[name], curves.end_s))
        for (name, lines), row in chain.from_iterable(((item, row) for row in (1, 2, 3)) for item in rows.items()):
            figure.add_scatter(
                x=curves.end_s,
                y=lines[row - 1],
                name=name,
                legendgroup=name,
                showlegend=row == col == 1,
                line={"color": COLOURS[name], "width": 3 if name == MEASURED else 1.5},
                opacity=0.5 if name == MEASURED else 1,
                row=row,
                col=col,
            )
        figure.update_xaxes(title_text="seconds", row=3, col=col)
    for row, title in enumerate(("running", "waiting", "generated token/s"), 1):
        figure.update_yaxes(title_text=title, rangemode="tozero", row=row, col=1)
    figure.update_layout(template="plotly_white", legend={"orientation": "h", "y": 1.08}, font={"size": 14})
    return figure


if __name__ == "__main__":
    main()

"""Draw the pictures of docs/sweeps.md from the directory of its sweep: ``python examples/sweeps/pictures.py DIR``.

They are those of the sweep's report, as PNG, which needs kaleido and a Chrome.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq

from hbmtwin.dashboard.sweep_figures import curves, heat_maps, pareto_figure
from hbmtwin.sim.sweep.points import point_summaries

DOCS = Path(__file__).resolve().parents[2] / "docs"
KEYS = ["kv_cache.preset", "workload.users"]


def main(directory: Path) -> None:
    """Write ``sweep-maps.png``, ``sweep-curves.png`` and ``sweep-pareto.png``."""
    points = point_summaries(pq.read_table(directory / "runs.parquet").to_pylist(), KEYS)
    for name, figure in (
        *(("maps", figure) for figure in heat_maps(points).values()),
        ("curves", curves(points)),
        ("pareto", pareto_figure(points)),
    ):
        figure.write_image(DOCS / f"sweep-{name}.png", width=1100, height=figure.layout.height, scale=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""One run of hbmtwin in a process of its own: ``python ours.py SETTINGS OUT``, with the settings as JSON.

Everything is recorded and written, as ``hbmtwin run --out`` does; the last line says what the traffic met.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.sim import catalog
from hbmtwin.sim.resolve import device_of, layout_of
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario


def main() -> None:
    """Simulate, write, and say how many requests were in flight."""
    settings: dict[str, Any] = json.loads(sys.argv[1])
    out = Path(sys.argv[2])
    scenario = Scenario.load(preset="paged", overrides=settings["overrides"])
    model, device = catalog.model(scenario.model.name), device_of(scenario)
    cost = RooflineCost(
        model,
        replace(device, **settings["figures"]),
        kv_token_bytes=layout_of(scenario, model, device).token_bytes,
    )
    result = Twin(scenario, cost=cost).run()
    result.save(out)
    rows = result.requests
    print(
        json.dumps(
            {
                "completed": result.summary["requests_completed"],
                "mean_s": float((rows["end_ns"] - rows["arrival_ns"]).mean() / 1e9),
                "duration_s": float(rows["end_ns"].max() / 1e9),
            }
        )
    )


if __name__ == "__main__":
    main()

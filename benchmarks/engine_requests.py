"""How many requests a second of CPU time the engine simulates, per preset, with everything recorded.

    python benchmarks/engine_requests.py [REQUESTS]

Open Poisson traffic of about 500 tokens in and 200 out on an Ascend 910B2 with Llama-2-7B; some 55 requests are in
flight under paged. The contiguous presets die early, so they get the first hundredth of the requests, with merged
buffers and half the load.
"""

from __future__ import annotations

import resource
import sys
import time

from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

TRAFFIC = (
    "device.name=ascend-910b2",
    'workload.prompt_tokens={distribution="lognormal",mean=500,sigma=0.5}',
    'workload.output_tokens={distribution="lognormal",mean=200,sigma=0.5}',
    "workload.system_prompt_tokens=0",
    "session.turns=1",
)


def measure(preset: str, requests: int, rate: float) -> str:
    """Simulate once; one line of figures."""
    overrides = [*TRAFFIC, f"workload.num_prompts={requests}", f"workload.request_rate={rate}"]
    if preset != "paged":
        overrides.append("kv_cache.tensors=merged")
    twin = Twin(Scenario.load(preset=preset, overrides=overrides))
    start = time.process_time()
    result = twin.run()
    seconds = time.process_time() - start
    summary, rows = result.summary, len(result.timeline)
    died = f", died of {result.oom['cause']}" if result.oom else ""
    return (
        f"{preset:9} {summary['requests_completed']:8,} requests in {seconds:7.2f} s CPU: "
        f"{summary['requests_completed'] / seconds:8,.0f} a second, {rows:,} timeline rows{died}"
    )


def main() -> None:
    """Print a line per preset, then the peak memory of the process."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    print(measure("paged", requests, 6.2))
    for preset in ("caching", "pooled", "doubling"):
        print(measure(preset, max(1, requests // 100), 3.1))
    print(f"peak resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")


if __name__ == "__main__":
    main()

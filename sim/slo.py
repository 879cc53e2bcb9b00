"""Service-level objectives: which requests were served as well as promised, and how many of those a second (goodput).

The words are those of ``vllm bench serve --goodput ttft:... tpot:... e2el:...``; a request is good if it meets each
objective that is given, equal is met, and one with a single output token meets any TPOT.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hbmtwin.sim.sections import SloSection

OBJECTIVES = ("ttft_s", "tpot_s", "e2e_s")


def objectives(slo: SloSection) -> dict[str, float]:
    """The objectives that a scenario sets, in seconds."""
    return {name: value for name in OBJECTIVES if (value := getattr(slo, name)) is not None}


def goodput(requests: pd.DataFrame, slo: SloSection, total: int, makespan_s: float) -> dict[str, Any] | None:
    """Requests that met every objective, as a number, a second of the run, and as a share; None without objectives.

    Shares are of *total*: a request that was rejected, died with the server or was never sent did not meet any.
    O(requests).
    """
    given = objectives(slo)
    if not given:
        return None
    completed = (requests["status"] == "completed").to_numpy(dtype=bool)

    def of(name: str) -> npt.NDArray[np.int64]:
        return requests[name].to_numpy(dtype=np.int64)[completed]

    seconds = {
        "ttft_s": lambda: (of("first_token_ns") - of("arrival_ns")) / 1e9,
        "tpot_s": lambda: (of("end_ns") - of("first_token_ns")) / np.maximum(of("output_tokens") - 1, 1) / 1e9,
        "e2e_s": lambda: (of("end_ns") - of("arrival_ns")) / 1e9,
    }  # made only if asked for; TPOT of a single token is 0
    met = {name: seconds[name]() <= limit for name, limit in given.items()}
    good = int(np.logical_and.reduce(list(met.values())).sum())
    share = good / total if total else None
    return {
        "requests_met": good,
        "requests_per_s": good / makespan_s if makespan_s > 0 else None,
        "share_met": share,
        "share_met_by_slo": {name: int(which.sum()) / total if total else None for name, which in met.items()},
        "attained": share is None or share >= slo.attainment,
    }

"""Plans as a file: ``plan.json`` in the directory that keeps their runs, for whoever opens them later.

::

    {"plans": {name: numbers + "verdict": {"en", "zh"}, "sentences": {"en": [[heading, sentence], ...], "zh": ...}},
     "left_out": {name: why}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hbmtwin.sim.capacity.capacity_plan import CapacityPlan
from hbmtwin.sim.capacity.oom_point_tables import write_file
from hbmtwin.sim.capacity.plan_words import sentences, verdict
from hbmtwin.sim.phrases import LANGUAGES

PLAN_FILE = "plan.json"


def write_plans(plans: Mapping[str, CapacityPlan], left_out: Mapping[str, str], directory: Path) -> None:
    """Write the file by one rename; same plans, same bytes. Raise ResultError."""
    told = {"plans": {name: in_both_languages(one) for name, one in plans.items()}, "left_out": dict(left_out)}
    text = json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_file(directory / PLAN_FILE, text.encode())


def in_both_languages(plan: CapacityPlan) -> dict[str, Any]:
    """A plan's numbers, and what is said of it: whoever reads it may want either language."""
    return {
        **plan.to_dict(),
        "verdict": {lang: verdict(plan, lang) for lang in LANGUAGES},
        "sentences": {lang: list(sentences(plan, lang)) for lang in LANGUAGES},
    }

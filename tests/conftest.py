"""Whatever Hypothesis draws in CI it draws again in the next run: a red run is a change's fault, not chance's.

Nor is it a busy machine's: how long an example takes is measured by benchmarks, and asserted nowhere.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

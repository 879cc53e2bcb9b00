"""Whatever Hypothesis draws in CI it draws again in the next run: a red run is a change's fault, not chance's."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, database=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

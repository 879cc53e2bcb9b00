"""The claims of write-up C."""

from __future__ import annotations

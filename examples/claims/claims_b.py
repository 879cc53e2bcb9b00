"""The claims of write-up B."""

from __future__ import annotations

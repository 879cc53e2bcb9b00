"""A scenario file with every key, its default, and what it means: what ``hbmtwin init`` writes.

All of it is read from the records of the scenario, so that it cannot disagree with them.
"""

from __future__ import annotations

from typing import Any

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hbmtwin.api import Scenario

_HEAD = """\
# An hbmtwin scenario. Every key is here with its default; keys without one are commented out.
# Bytes may be written with a unit ("29.5GiB"). `hbmtwin catalog` lists devices, models and policies.
# hbmtwin run FILE      hbmtwin compare FILE      hbmtwin run FILE --set workload.num_prompts=100
"""


def commented_scenario() -> str:
    """The text of the file. Reading it back gives the default scenario."""
    scenario = Scenario()
    lines = [_HEAD]
    sections: list[str] = []
    for name, info in Scenario.model_fields.items():
        value = getattr(scenario, name)
        if isinstance(value, BaseModel):
            sections += ["", f"[{name}]"]
            for key, inner in type(value).model_fields.items():
                sections += _entry(key, getattr(value, key), inner)
        else:
            lines += _entry(name, value, info)
    return "\n".join([*lines, *sections]) + "\n"


def _entry(key: str, value: Any, info: FieldInfo) -> list[str]:
    comment = [f"# {info.description}"] if info.description else []
    if value is None:
        return [*comment, f"# {key} ="]
    if value == {}:  # as a table of its own it would end the section
        return [*comment, f"{key} = {{}}"]
    return [*comment, tomli_w.dumps({key: value}).strip()]

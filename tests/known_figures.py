"""A profile that leaves nothing uncertain but what a test asks for: error bars then take few runs."""

from __future__ import annotations

from pathlib import Path

from hbmtwin.api import device
from hbmtwin.kernels.profile import COEFFICIENTS, Coefficient, Profile


def known_figures(file: Path, **uncertain: tuple[float, float]) -> tuple[str, ...]:
    """The settings by which a run of the default device takes *file*, with the ends of figures that are not exact."""
    spec = device("ascend-910b4")
    values = {name: float(getattr(spec, name)) for name in COEFFICIENTS if getattr(spec, name)}
    ends = {name: uncertain.get(name, (value, value)) for name, value in values.items()}
    profile = Profile(
        name="known",
        device=spec.name,
        made="-",
        source="by hand",
        coefficients={name: Coefficient(value, *ends[name], 0.0, 1, "L") for name, value in values.items()},
        memory={
            "context_bytes": 0,
            "activation_bytes": 200 << 20,
            "non_torch_bytes": 150 << 20,
            "graph_bytes": 1 << 28,
        },
    )
    file.write_text(profile.to_json(), encoding="utf-8")
    return f"calibration.profile={file}", f"device.memory_bytes={spec.memory_bytes}"

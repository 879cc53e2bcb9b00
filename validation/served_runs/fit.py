"""The figures of a device that a server's log tells: a profile from nothing but rates and counts over time.

::

    log --steps_of--> steps of each interval --blocks of seconds--> modelled / measured time
                                                                          |
    catalog: value, low..high of each figure --> prior ------------> least squares in logarithms
                                                                          |
                    which figure does the log tell?  <-- uncertainty after / before

The figures are those of :data:`FITTED`, the same for every log. Each begins as the catalog has it, with its range as
four standard deviations, and moves as far as the log makes it: one that the log does not tell stays where it was. It
counts as *told* where the log halves its uncertainty. What is always confounded is so found by arithmetic: a part of
each step that nothing in the log varies (the fixed overhead against streaming the weights), or two that grow with the
same tokens (the link against FLOPs, which move together along the prior).

A step that ends just after an interval is counted in the next one, so neighbours are summed in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, exp, floor, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hbmtwin.kernels.profile import Coefficient, Profile, model_quantities
from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.sim.catalog import device_figures
from hbmtwin.sim.kv_layout import kv_layout
from hbmtwin.validation.served_runs.log import read_engine_log
from hbmtwin.validation.served_runs.served_run import Interval, ServedRunError, ServerSettings, read_served_run
from hbmtwin.validation.served_runs.steps import Steps, steps_of

FITTED = (
    "weight_bandwidth_efficiency",
    "kv_bandwidth_efficiency",
    "prefill_flops_efficiency",
    "link_bandwidth_bytes_per_s",
    "step_overhead_ns",
)
"""Figures of a device that are tried; the link only where ranks share layers."""
TOLD = 0.5
"""A figure is told by a log that makes its uncertainty this much smaller, or more."""
UNRANGED = 0.1
"""Standard deviation, in logarithms, of a figure for which the catalog has no range."""
BLOCK_S, LEAST_BLOCK_S = 5.0, 2.0
"""Neighbouring intervals that are summed: one step more or less in five seconds is a per cent or two."""
MODEL_NOISE = 0.03
"""Relative error of a block's time that is laid to the model: a sum of a few terms is not expected to come nearer."""
CUT_STEPS = 0.41
"""Standard deviation, in steps, of where a block's two ends cut the server's: two of 1 / sqrt(12)."""
FOLDS = 5
"""In cross-validation, of which every fifth block is held back in turn."""
_ROUNDS, _SMALLEST_STEP, _DIFFERENCE, _LARGEST_STEP = 30, 1e-4, 1e-3, 0.3

Vector = NDArray[np.float64]


class Told(NamedTuple):
    """One figure, and how much of it came from the log."""

    value: float
    deviation: float
    """Standard deviation of its logarithm after the fit, about its relative error."""
    prior_deviation: float
    """The same before, by the catalog's range."""

    @property
    def told(self) -> bool:
        """Whether the log tells it: else it is little more than the catalog's, or one of several that only their sum
        is told of."""
        return self.deviation <= TOLD * self.prior_deviation


class Fit(NamedTuple):
    """A log's fit."""

    device: DeviceSpec
    """The device with the fitted figures."""
    figures: Mapping[str, Told]
    residuals: tuple[float, ...]
    """Of each block, the logarithm of its modelled over its measured time."""
    steps: tuple[Steps, ...]
    """What was fitted to."""
    cross_validated_percent: float
    ranks: int
    """That shared layers."""


def fit_intervals(
    intervals: Sequence[Interval], model: ModelShape, device: DeviceSpec, settings: ServerSettings
) -> Fit:
    """Fit :data:`FITTED` to a log. O(rounds x figures x intervals).

    Raise ServedRunError for a log that tells too little, CatalogError for a device that the catalog does not have,
    ValueError as :class:`RooflineCost` does.
    """
    steps = steps_of(intervals, settings)
    blocks = _blocks(steps)
    if len(blocks) < 3:
        raise ServedRunError(f"{len(blocks)} stretches in which the server was busy are too few; give a longer log")
    names = [n for n in FITTED if settings.ranks > 1 or n != "link_bandwidth_bytes_per_s"]
    prior = _Prior(device, names)
    problem = _Problem(model, device, settings.ranks, blocks)
    solved = problem.solve(names, prior)
    figures = {
        name: Told(float(getattr(solved.device, name)), after, prior.deviations[name])
        for name, after in zip(names, solved.deviations, strict=True)
    }
    errors = [error for fold in range(min(FOLDS, len(blocks) - 1)) for error in _held_back(problem, names, prior, fold)]
    return Fit(
        solved.device,
        figures,
        tuple(solved.residuals.tolist()),
        tuple(one for block in blocks for one in block),
        100 * float(np.mean(np.abs(errors))),
        settings.ranks,
    )


def fit_engine_log(
    path: Path,
    model: ModelShape,
    device: DeviceSpec,
    settings: ServerSettings | None = None,
    *,
    name: str = "engine log",
    made: str = "not told",
) -> Profile:
    """The profile of a log of vLLM, or of a directory with a recorded run, which has its own *settings*.

    Raise ServedRunError for what cannot be read or tells too little, ProfileError for a bad *name* or figures that no
    device has, CatalogError and ValueError as :func:`fit_intervals` does.
    """
    if path.is_dir():
        run = read_served_run(path)
        settings, intervals = settings or run.settings, run.intervals
    else:
        settings = settings or ServerSettings()
        intervals, kv_tokens = read_engine_log(path, engines=settings.data_parallel_size)
        if settings.kv_tokens is None:
            settings = replace(settings, kv_tokens=kv_tokens)
    fit = fit_intervals(intervals, model, device, settings)
    return profile_of_fit(fit, model, device, name=name, made=made, source=f"log of an engine, {path.name}")


def profile_of_fit(fit: Fit, model: ModelShape, device: DeviceSpec, *, name: str, made: str, source: str) -> Profile:
    """All figures of a fit, as they belong together, with the range in which it was told; what was not is L."""
    residual = 100 * float(np.median(np.abs(fit.residuals)))
    mixed = [s for s in fit.steps if s.prefills]
    spans: dict[str, tuple[float, float]] = {
        "decode_count": _span([s.decode_count for s in fit.steps]),
        "kv_read_tokens": _span([s.kv_tokens for s in fit.steps]),
        "step_tokens": _span([s.decode_count for s in fit.steps] + [s.decode_count + s.prompt_tokens for s in mixed]),
        **{key: (value, value) for key, value in model_quantities(model).items()},
        "tensor_parallel_size": (fit.ranks, fit.ranks),
    }
    if mixed:
        spans["prefill_tokens"] = (0, spans["step_tokens"][1])  # prompts fill a step next to a few decodes
    return Profile(
        name=name,
        device=device.name,
        made=made,
        source=source,
        coefficients={
            key: Coefficient(
                one.value,
                one.value * exp(-2 * one.deviation),
                one.value * exp(2 * one.deviation),
                residual,
                len(fit.residuals),
                "M" if one.told else "L",
            )
            for key, one in fit.figures.items()
        },
        validity=spans,
        cross_validated_percent=fit.cross_validated_percent,
    )


def _span(values: Sequence[float]) -> tuple[int, int]:
    return floor(min(values)), ceil(max(values))


def _blocks(steps: Sequence[Steps | None]) -> list[list[Steps]]:
    """Neighbours of one kind, with prompts or without, up to :data:`BLOCK_S` together; shorter ones are left out."""
    found: list[list[Steps]] = []
    current: list[Steps] = []
    for one in (*steps, None):
        full = sum(s.seconds for s in current) >= BLOCK_S
        if current and (one is None or full or (one.prefills > 0) != (current[0].prefills > 0)):
            if sum(s.seconds for s in current) >= LEAST_BLOCK_S:
                found.append(current)
            current = []
        if one is not None:
            current.append(one)
    return found


class _Prior:
    """What the catalog knows of the figures, in logarithms."""

    def __init__(self, device: DeviceSpec, names: Sequence[str]) -> None:
        catalog = device_figures(device.name)
        self.means: dict[str, float] = {}
        self.deviations: dict[str, float] = {}
        for name in names:
            figure, value = catalog[name], float(getattr(device, name))
            if value <= 0:
                raise ServedRunError(f"{device.name} has no {name} to begin from; give the device one")
            self.means[name] = log(value)
            self.deviations[name] = log(figure.high / figure.low) / 4 if figure.low and figure.high else UNRANGED


class _Solved(NamedTuple):
    device: DeviceSpec
    residuals: Vector
    deviations: tuple[float, ...]


class _Problem:
    """Blocks of steps whose measured time a device's figures are to give."""

    def __init__(self, model: ModelShape, device: DeviceSpec, ranks: int, blocks: Sequence[Sequence[Steps]]) -> None:
        self.model, self.device, self.ranks, self.blocks = model, device, ranks, blocks
        steps = np.array([sum(s.steps for s in block) for block in blocks])
        self.noise: Vector = np.hypot(MODEL_NOISE, CUT_STEPS / steps)
        self.token_bytes = kv_layout(model, tensor_parallel_size=ranks).token_bytes

    def residuals(self, device: DeviceSpec) -> Vector:
        """Logarithm of modelled over measured time, of each block."""
        cost = RooflineCost(self.model, device, tensor_parallel_size=self.ranks, kv_token_bytes=self.token_bytes)
        return np.array(
            [log(sum(s.modelled_s(cost) for s in block) / sum(s.seconds for s in block)) for block in self.blocks]
        )

    def solve(self, names: Sequence[str], prior: _Prior, left_out: slice | None = None) -> _Solved:
        """Gauss-Newton from the prior's means. Blocks of *left_out* do not count."""
        counted = np.ones(len(self.blocks), dtype=bool)
        if left_out is not None:
            counted[left_out] = False
        means, spread = (np.array([side[n] for n in names]) for side in (prior.means, prior.deviations))
        at, noise = means.copy(), self.noise[counted]
        for _ in range(_ROUNDS):
            here = self.residuals(self._at(names, at))
            slopes = np.array(
                [
                    (self.residuals(self._at(names, at + _DIFFERENCE * unit)) - here) / _DIFFERENCE
                    for unit in np.eye(len(names))
                ]
            ).T
            matrix = np.vstack([slopes[counted] / noise[:, None], np.diag(1 / spread)])
            aim = np.concatenate([-here[counted] / noise, (means - at) / spread])
            move = np.clip(np.linalg.lstsq(matrix, aim, rcond=None)[0], -_LARGEST_STEP, _LARGEST_STEP)
            at = at + move
            if np.abs(move).max() < _SMALLEST_STEP:
                break
        device = self._at(names, at)
        covariance = np.linalg.inv(matrix.T @ matrix)
        return _Solved(device, self.residuals(device), tuple(np.sqrt(np.diag(covariance)).tolist()))

    def _at(self, names: Sequence[str], logarithms: Vector) -> DeviceSpec:
        values: dict[str, Any] = {
            name: round(exp(value)) if name.endswith("_ns") else exp(value)
            for name, value in zip(names, logarithms.tolist(), strict=True)
        }
        return replace(self.device, **values)


def _held_back(problem: _Problem, names: Sequence[str], prior: _Prior, fold: int) -> list[float]:
    """Residuals of the blocks that a fold holds back."""
    held = slice(fold, None, FOLDS)
    return [float(r) for r in problem.solve(names, prior, held).residuals[held]]

"""Whether a server starts, asked by name: the one function behind ``run``, ``fit`` and the dashboard.

::

    fit(model, device, flags ...)          options --ask--> question --budget_of--> budget  +  advice, warnings, log
    memory_budget(shapes, numbers ...)     what a run plans with: the same question, the same budget
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from hbmtwin.allocators.kv_groups import MambaMode
from hbmtwin.allocators.records import KVLayout
from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.kernels.stages import stage_layers
from hbmtwin.sim.budget.memory_budget import MemoryBudget, budget_of
from hbmtwin.sim.budget.question import BudgetQuestion, Measured, check_question
from hbmtwin.sim.budget.ranges import objection_at_the_bad_end, objection_at_the_good_end
from hbmtwin.sim.engines import EngineRules, rules_for
from hbmtwin.sim.engines.boot_lines import boot_lines
from hbmtwin.sim.fit.advice import Advice, Advised, advise, cures
from hbmtwin.sim.fit.kernels import findings_of, said
from hbmtwin.sim.fit.options import FitOptions
from hbmtwin.sim.fit.pairs import together
from hbmtwin.sim.fit.question import ask
from hbmtwin.sim.fit.report import Fit
from hbmtwin.sim.fit.runnable import advise_runnable, runnable_with_memory
from hbmtwin.sim.fit.warnings import warnings_of
from hbmtwin.sim.phrases import Said


def fit(
    model: str | ModelShape | None = None,
    device: str | DeviceSpec | None = None,
    /,
    **options: Unpack[FitOptions],
) -> Fit:
    """Whether *model* starts on *device* with these settings, in the engines' own names (:class:`FitOptions`).

    What is left out is the engine's default, or estimated. Raise FitError for an option that makes no sense or for
    what is missing, CatalogError for a name that the catalog does not know.
    """
    if model is not None:
        options["model"] = model
    if device is not None:
        options["device"] = device
    asked = ask(options)
    q, budget = asked.question, asked.budget
    findings = findings_of(q, **asked.kernel_settings())
    refused = next((said(finding) for finding in findings if finding.refused), None)
    at_the_end = q.at_length(1) if asked.auto_length else q  # it would be shorter then
    known = (*map(said, findings), *budget.warnings)
    confirm = partial(_asked_again, options, known=known, must_run=True)
    runnable: tuple[Advice, ...] = ()
    advised = Advised((), ())
    if refused is not None:
        runnable = advise_runnable(q, asked.kernel_settings(), confirm)
        if not budget.fits:
            advised = advise(q, confirm=partial(_asked_again, options, known=known, must_run=False))
        if not runnable:
            advised = replace(advised, pairs=runnable_with_memory(q, asked.kernel_settings(), confirm))
    elif not budget.fits:
        advised = advise(q, confirm=confirm)
        if not advised.helps:
            advised = replace(advised, pairs=together(q, confirm))
    return Fit(
        question=q,
        budget=budget,
        arguments=asked.arguments,
        advised=advised,
        runnable=runnable,
        refused=refused,
        warnings=(
            *asked.notes,
            *map(said, findings),
            *budget.warnings,
            *warnings_of(q, budget, auto_length=asked.auto_length, only_kv=asked.only_kv),
        ),
        boot_lines=boot_lines(q, budget),
        may_not_start=objection_at_the_bad_end(at_the_end, budget) if budget.fits else None,
        may_start=not budget.fits and objection_at_the_good_end(q, budget) is None,
        built_in=asked.built_in,
        auto_length=asked.auto_length,
    )


def _asked_again(
    options: Mapping[str, Any], advice: Advice, *, known: Collection[Said], must_run: bool
) -> Advice | None:
    """*advice* as it comes out for whoever takes it, with the defaults that follow from it and what is said of it that
    is not *known*; None where it does not start after all."""
    try:
        asked = ask({**options, **advice.settings})
    except ValueError:  # it does not go together with another setting
        return None
    findings = findings_of(asked.question, **asked.kernel_settings())
    if not asked.budget.fits or (must_run and any(finding.refused for finding in findings)):
        return None
    told = (*(said(finding) for finding in findings if not finding.refused), *asked.budget.warnings)
    notes = tuple(note for note in told if note not in known)
    return replace(advice, question=asked.question, budget=asked.budget, notes=notes)


def memory_budget(
    model: ModelShape,
    device: DeviceSpec,
    *,
    layout: KVLayout,
    gpu_memory_utilization: float,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    block_size: int,
    other_tenant_bytes: int = 0,
    activation_bytes: int | None = None,
    non_torch_bytes: int | None = None,
    graph_bytes: int | None = None,
    communicator_bytes: int | None = None,
    profiled: Collection[str] = (),
    sinks: int = 0,
    mamba_mode: MambaMode = "none",
    pipeline_parallel_size: int = 1,
    layer_partition: Sequence[int] | None = None,
    async_scheduling: bool = False,
    rules: EngineRules | None = None,
) -> MemoryBudget:
    """Divide one device as the engine does at start: ``kv = util * total - weights - activations - non-torch``.

    *layout* is that of the KV of all layers on one rank, and tells over how many ranks each layer is split. Windows of
    the model's layers make groups of blocks, and keep *sinks* tokens at the start besides; so do states, cached by
    *mamba_mode*. *layer_partition* says how many layers each stage of a pipeline has; with *async_scheduling* windows
    keep what two batches under way may read. *activation_bytes*,
    *non_torch_bytes*, *graph_bytes* and *communicator_bytes* replace estimates; *profiled* are names of those that the
    device's calibration profile has. *rules* replace those of the device's engine. When it does not start,
    the reason ends with the single changes that were tried and hold. O(layers). Raise ValueError for a number out of
    range or a model that cannot be split so.
    """
    question = BudgetQuestion(
        model=model,
        device=device,
        rules=rules or rules_for(device),
        layout=layout,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        other_tenant_bytes=other_tenant_bytes,
        sinks=sinks,
        mamba_mode=mamba_mode,
        layers=stage_layers(model.num_layers, pipeline_parallel_size, layer_partition),
        async_scheduling=async_scheduling,
        measured=Measured(
            activation_bytes=activation_bytes,
            non_torch_bytes=non_torch_bytes,
            graph_bytes=graph_bytes,
            communicator_bytes=communicator_bytes,
        ),
        profiled=frozenset(profiled),
    )
    check_question(question)
    budget = budget_of(question)
    return budget if budget.fits else replace(budget, reason=f"{budget.reason}. {cures(question)}")

"""What sweeps, OOM points, groups of ranks and whole steps say in Chinese: held to it by ``test_chinese``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from hbmtwin.dashboard import (
    collectives_figure,
    oom_point_figure,
    oom_point_words,
    run_replay_steps,
    sweep_figures,
    sweep_words,
)
from hbmtwin.sim.capacity.oom_point import CriticalLoad, OomPoint
from hbmtwin.sim.capacity.oom_point_draws import Draw
from hbmtwin.sim.capacity.oom_point_loads import Load
from hbmtwin.sim.capacity.oom_point_runs import End
from hbmtwin.sim.capacity.smallest_memory import SmallestMemory
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.sweep.points import Spread
from hbmtwin.validation.bench.records import Bench
from hbmtwin.validation.run_replay.step_report import StepReplay

from ..sweep.test_sweep_figures import ABOUT, two_axes
from ..validation.test_calibrate_collectives import measured

WORDS = {"preset", "users", "rank", "AllReduce", "Pareto", "GB"}
"""Names of keys, and those of the field."""
POINTS = two_axes()
GIB = 1 << 30


def groups() -> Bench:
    """Of two, four and eight ranks, eager and in a graph."""
    eager = measured()
    return replace(eager, points=eager.points + measured(op="all_reduce_in_graph").points)


def died(cause: str, users: int) -> dict[str, Any]:
    """What is read of a run at a critical load."""
    places = {"died_users": users, "died_turn": users - 6, "died_at_s": users / 2, "died_operations": 100 * users}
    return {"cause": cause, "first_preemption_s": 3.5, **places}


def oom_point(words: str = "users") -> OomPoint:
    """Three seeds: doubling dies of two causes, one of them not monotone, paged gives way; one run broke."""
    deaths = (died("external_fragmentation", 7), died("growth_copy", 8), died("external_fragmentation", 7))
    critical = [
        CriticalLoad("doubling", "fails", draw, row["died_users"], draw != 1, row) for draw, row in enumerate(deaths)
    ]
    critical += [CriticalLoad("paged", "fails", draw, None, True, None) for draw in range(3)]
    gave_way = [died("held", 8), died("held", 8), None]
    critical += [
        CriticalLoad("paged", "preempts", draw, None if row is None else 8, True, row)
        for draw, row in enumerate(gave_way)
    ]
    asked = {"policy": "paged", "load": 10, "memory_bytes": None}
    runs: list[dict[str, Any]] = [
        {**asked, "outcome": "held", "recomputed_share": 0.219, "thrashing_minutes": minutes} for minutes in (0, 2, 1)
    ]
    runs.append({**asked, "outcome": "failed", "recomputed_share": None, "error": "OOM"})
    sizes = {"doubling": (27, 28, None), "paged": (26, 26, 26)}
    return OomPoint(
        scenario=Scenario.load(),
        load=Load(words, (6, 7, 8, 10)),
        draws=tuple(Draw(f"seed {seed}", {"seed": seed}) for seed in range(3)),
        varies="3 seeds",
        ends={"doubling": ("fails",), "paged": ("fails", "preempts")},
        left_out={},
        critical=tuple(critical),
        smallest=(
            *(SmallestMemory(policy, "fails", 0, 6, 26 * GIB, True) for policy in sizes),
            *(
                SmallestMemory(policy, "fails", draw, 8, None if size is None else size * GIB, True)
                for policy, found in sizes.items()
                for draw, size in enumerate(found)
            ),
        ),
        runs=tuple(runs),
    )


def broken() -> OomPoint:
    """Of which no run says anything."""
    two = tuple(Draw(f"seed {seed}", {}) for seed in range(2))
    return OomPoint(Scenario.load(), Load("num_prompts", (1, 2)), two, "2 seeds", {"a": ("fails",)}, {}, (), (), ())


def whole_steps(*, same_device: bool) -> StepReplay:
    """One of each kind."""
    ns = np.array([3_000_000, 2_000_000, 1_000_000])
    return StepReplay(
        measured_on="cpu",
        predicted_for="ascend-910b4",
        basis="",
        same_device=same_device,
        clock="wall",
        steps=np.arange(3),
        kinds=("prefill", "mixed", "decode"),
        sequences=np.arange(1, 4),
        stands_for=np.ones(3),
        predicted_ns=ns,
        measured_ns=ns + 10_000,
        least_ns=ns,
        predicted_attention_ns=ns // 3,
        measured_attention_ns=ns // 4,
        num_layers=2,
        layers_measured=2,
        at_depth_ns=ns,
        without_layers_ns=ns[:0],
        total_steps=3,
        total_predicted_ns=int(ns.sum()),
        left_out=0,
        notes=(),
    )


def table_of(point: int) -> list[list[str]]:
    """The header of a sweep's table, and a row of it."""
    header, cells = sweep_words.summary_rows(POINTS, "zh")
    return [header, cells[point]]


ENDS: tuple[tuple[str, End], ...] = (("doubling", "fails"), ("paged", "fails"), ("paged", "preempts"))

FIGURES: dict[Callable[..., object], Callable[[], list[go.Figure]]] = {
    sweep_figures.heat_maps: lambda: list(sweep_figures.heat_maps(POINTS, "zh").values()),
    sweep_figures.curves: lambda: [sweep_figures.curves(POINTS, "zh")],
    sweep_figures.pareto_figure: lambda: [sweep_figures.pareto_figure(POINTS, "zh")],
    oom_point_figure.share_by_load: lambda: [
        oom_point_figure.share_by_load(oom_point(word), "zh") for word in ("users", "request_rate", "rate_scale")
    ],
    oom_point_figure.cause_shares: lambda: [oom_point_figure.cause_shares(oom_point(), "zh")],
    oom_point_figure.share_by_place: lambda: [oom_point_figure.share_by_place(oom_point(), "zh")],
    oom_point_figure.memory_by_load_figure: lambda: [oom_point_figure.memory_by_load_figure(oom_point(), "zh")],
    run_replay_steps.steps_figure: lambda: [
        run_replay_steps.steps_figure(whole_steps(same_device=same), "zh") for same in (True, False)
    ],
    collectives_figure.collectives_figure: lambda: [collectives_figure.collectives_figure(groups(), "zh")],
}
SENTENCES: dict[Callable[..., object], tuple[Callable[[], object], object]] = {
    sweep_words.point_name: (
        lambda: sweep_words.point_name(POINTS[0].settings, "zh"),
        "preset paged、users 10",
    ),
    sweep_words.capacity_name: (lambda: sweep_words.capacity_name(POINTS, "zh"), "服务的用户数"),
    sweep_words.headline: (
        lambda: sweep_words.headline(POINTS, ABOUT, "zh"),
        "12 次运行中 9 次跑完全程。所有种子都跑完全程的组合中，承载最多的是 preset paged、users 30（TTFT p99 1.50 s，"
        "TPOT p99 30.0 ms）。",
    ),
    sweep_words.summary_rows: (
        lambda: [cells[2:] for cells in table_of(4)],
        [
            ["跑完全程", "跑完比例\n（95 %）", "每秒\n请求数", "TTFT p99\n（s）", "TPOT p99\n（ms）", "其余运行"],
            ["1 / 2", "50 %（1 至 99）", "2.000", "0.50", "10.0", "增长缓冲区的旧副本 1 次"],
        ],
    ),
    sweep_words.share_text: (lambda: sweep_words.share_text(Spread(0.9, 0.55, 0.997), "zh"), "90 %（55 至 100）"),
    sweep_words.ends_text: (
        lambda: sweep_words.ends_text({"held": 1200, "live_lock": 2, "kv_capacity": 1, "does_not_fit": 1}, "zh"),
        "跑完全程 1,200 次，活锁 2 次，KV 容量不足 1 次，放不下 1 次",
    ),
    sweep_words.cause_text: (lambda: sweep_words.cause_text("external_fragmentation", "zh"), "显存碎片"),
    oom_point_words.header: (
        lambda: oom_point_words.header("zh"),
        ("策略", "事件", "样本数", "负载", "原因", "用户数", "轮次", "时间（s）", "操作数"),
    ),
    oom_point_words.name_of: (lambda: oom_point_words.name_of("paged", "preempts", "zh"), "paged，抢占"),
    oom_point_words.headline: (
        lambda: oom_point_words.headline(oom_point(), "zh").partition("，")[2],
        "ascend-910b4，6 至 10 个用户：3 个种子",
    ),
    oom_point_words.sentences: (
        lambda: oom_point_words.sentences(oom_point(), "zh"),
        [
            "全部 3 个样本显存够用：doubling 到 6 为止，paged 到所给的最大负载 10 为止"
            "（不抢占则到 7 为止）（用户数）。",
            "6 至 8 个用户，所有样本都能跑完的最小显存（GiB）：doubling 26.00 至 超过 1,024；paged 26.00 至 26.00。",
            "doubling 显存耗尽：首次在 7 个用户，8 时达到全部样本；6 时一个也没有（3 个样本中 0 个：95% 置信度下"
            "比例低于 71%）。原因：显存碎片 2、增长缓冲区的旧副本 1。",
            "paged 直到 10 个用户都未出现显存耗尽（3 个样本中 0 个：95% 置信度下比例低于 71%）。",
            "paged 抢占：首次在 8 个用户，到 10 为止 3 个样本中有 2 个；7 时一个也没有（3 个样本中 0 个：95% "
            "置信度下比例低于 71%）。10 个用户时最多重复计算了 21.9 % 的 token，所有样本合计有 3 分钟处于抢占抖动。",
            "非单调：9 个样本中有 1 个在较小的负载下失败，却在更大的负载下跑完（doubling）；对它们运行了每个负载，"
            "以首次失败为准。",
            "1 次运行报错，其样本不计入；第一个错误：OOM",
        ],
    ),
    oom_point_words.plan: (
        lambda: oom_point_words.plan(broken(), "zh"),
        "全部 2 个样本显存够用：a 没有已知的负载（请求数）。",
    ),
    oom_point_words.memory_plan: (
        lambda: oom_point_words.memory_plan(oom_point("request_rate"), "zh").partition("，")[0],
        "6 至 每秒 8 个会话",
    ),
    oom_point_words.cause_counts: (
        lambda: oom_point_words.cause_counts({"shortage": 2, "does_not_fit": 1}, "zh"),
        "显存不足 2、放不下 1",
    ),
    oom_point_words.cause_name: (lambda: oom_point_words.cause_name("parked_history", "zh"), "保留的历史会话"),
    oom_point_words.rows: (
        lambda: oom_point_words.rows(oom_point(), "zh")[::2],
        [
            ("doubling", "显存耗尽", "3 / 3", "7 至 8", "显存碎片 2、增长缓冲区的旧副本 1", "7", "2", "3.5", "700"),
            ("paged", "抢占", "2 / 3", "8", "–", "8", "3", "3.5", "800"),
        ],
    ),
    oom_point_words.memory_header: (
        lambda: oom_point_words.memory_header(oom_point(), "zh"),
        ("用户数", "doubling", "paged", "paged，抢占"),
    ),
    oom_point_words.memory_rows: (
        lambda: oom_point_words.memory_rows(oom_point(), "zh"),
        [("6", "26.00", "26.00", "–"), ("8", "28.00 (27.00 – 超过 1,024)", "26.00", "–")],
    ),
    oom_point_words.gib: (lambda: oom_point_words.gib(None, "zh"), "超过 1,024"),
    oom_point_words.fate: (
        lambda: [oom_point_words.fate(oom_point(), *which, "zh") for which in ENDS],
        ["首次 7，8 时全部", "到 10 未出现", "首次 8，到 10 为止 2 / 3"],
    ),
}

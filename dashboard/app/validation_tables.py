"""Tables of the Validate page: how far predicted is from measured, and the figures of a calibration profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from hbmtwin.dashboard.app.language import text
from hbmtwin.dashboard.figure_text import figure_text
from hbmtwin.dashboard.run_replay_page import LABELS
from hbmtwin.dashboard.verdict import bytes_text
from hbmtwin.kernels.profile import Coefficient
from hbmtwin.sim.capacity.assumptions import WORDS
from hbmtwin.sim.phrases import Phrase

QUANTITY, WORST = Phrase("quantity", "量"), "worst_step"
COLUMNS = {
    "steps": Phrase("steps", "步数"),
    "differing": Phrase("that differ", "不一致"),
    "mape_percent": Phrase("MAPE (%)", "MAPE（%）"),
    "p50_percent": Phrase("p50 (%)", "p50（%）"),
    "p95_percent": Phrase("p95 (%)", "p95（%）"),
    WORST: Phrase("worst step", "最差步"),
}
"""Columns of a table of errors, by what a report calls them."""
BEHIND = Phrase("{quantity}, behind one factor", "{quantity}，除去同一倍数后")
OF_TIMES = {
    "step time (ns)": Phrase("step time", "整步时间"),
    "attention time (ns)": Phrase("attention time", "attention 时间"),
    "by the least of the rounds": Phrase("by the least of the rounds", "按各轮最小值"),
    "prefill steps": Phrase("prefill steps", "prefill 步"),
    "mixed steps": Phrase("mixed steps", "混合步"),
    "decode steps": Phrase("decode steps", "decode 步"),
    "attention in them": Phrase("attention in them", "其中的 attention"),
}
INDENT = "\u2003"
FIGURE, MEANING = Phrase("figure", "系数"), Phrase("what it is", "含义")
VALUE, LOW, HIGH = Phrase("value", "取值"), Phrase("low", "下限"), Phrase("high", "上限")
POINTS, RESIDUAL = Phrase("points", "测点数"), Phrase("residual (%)", "残差（%）")
MORE_WORDS = {
    "elementwise_bytes_per_s": Phrase("the speed of a layer's small operators", "每层小算子的速度"),
    "attention_sequence_ns": Phrase("the time of a sequence in an attention call", "attention 调用中每条序列的时间"),
    "communicator_bytes": Phrase("what communicators hold", "通信缓冲"),
    "attention_block_tokens": Phrase(
        "keys that causal attention computes as one block", "因果 attention 按块计算的 token 数"
    ),
    "matmul_overlap": Phrase("how much of reading weights hides behind computing", "读取权重与计算重叠的比例"),
}
"""Of those that no plan leans on."""
RANGE_OF = {
    "step_tokens": Phrase("tokens of a step", "每步 token 数"),
    "prefill_tokens": Phrase("prompt tokens of a step", "每步 prefill token 数"),
    "prefill_context_tokens": Phrase("longest context of a prompt", "prefill 的最长历史"),
    "decode_count": Phrase("sequences that decode", "decode 序列数"),
    "kv_read_tokens": Phrase("tokens that they read", "decode 读取的 token 数"),
    "num_layers": Phrase("layers", "层数"),
    "dtype_bytes": Phrase("bytes of a number", "每个数的字节数"),
    "allreduce_bytes": Phrase("bytes that a step's all-reduces send", "每步 AllReduce 的字节数"),
}
"""Of quantities that have no name of their own in engines."""


def errors_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row a quantity; nothing where no step is the worst."""
    names = [quantity_name(str(row["quantity"])) for row in rows]
    columns = {text(title): [row[column] for row in rows] for column, title in COLUMNS.items()}
    columns[text(COLUMNS[WORST])] = [row[WORST] if row[WORST] >= 0 else None for row in rows]
    return pd.DataFrame({text(QUANTITY): names, **columns})


def quantity_name(quantity: str) -> str:
    """In the language in use; what is part of the one above it is set in."""
    plain, behind, _ = quantity.strip().partition(", behind one factor")
    known = LABELS.get(plain) or OF_TIMES.get(plain)
    name = plain if known is None else text(known)
    return INDENT * quantity.startswith(" ") + (text(BEHIND, quantity=name) if behind else name)


def coefficients_table(coefficients: Mapping[str, Coefficient]) -> pd.DataFrame:
    """A row a figure, in units that people read."""
    rows = list(coefficients.items())
    return pd.DataFrame(
        {
            text(FIGURE): [name for name, _ in rows],
            text(MEANING): [_meaning(name) for name, _ in rows],
            text(VALUE): [figure_text(name, c.value) for name, c in rows],
            text(LOW): [figure_text(name, c.low) for name, c in rows],
            text(HIGH): [figure_text(name, c.high) for name, c in rows],
            text(POINTS): [c.points for _, c in rows],
            text(RESIDUAL): [f"{c.residual_percent:.1f}" for _, c in rows],
        }
    )


def memory_table(memory: Mapping[str, int]) -> pd.DataFrame:
    """Bytes that were measured."""
    return pd.DataFrame(
        {
            text(FIGURE): list(memory),
            text(MEANING): [_meaning(name) for name in memory],
            text(VALUE): [bytes_text(value) for value in memory.values()],
        }
    )


def validity_table(validity: Mapping[str, tuple[float, float]]) -> pd.DataFrame:
    """What was measured, from and to."""
    return pd.DataFrame(
        {
            text(QUANTITY): [text(RANGE_OF[name]) if name in RANGE_OF else name for name in validity],
            text(LOW): [f"{low:,.10g}" for low, _ in validity.values()],
            text(HIGH): [f"{high:,.10g}" for _, high in validity.values()],
        }
    )


def _meaning(name: str) -> str:
    key = name.partition(".")[0]
    known = WORDS.get(key) or MORE_WORDS.get(key)
    return "" if known is None else text(known)

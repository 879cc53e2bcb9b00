"""The knobs of a scenario in the sidebar, and the scenario that they stand for.

::

    address (?set=a.b=c) -> settings of the session <-> knobs, preset, upload, free lines -> Scenario

One list of settings is the truth, in the words of ``--set``; a knob shows what the scenario has, and a turn of it
replaces that one setting. So what no knob is for (an uploaded file may say anything) stays as it was said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import streamlit as st

from hbmtwin.api import PRESETS, CatalogError, DoesNotFit, Scenario, ScenarioError, devices, models, workload_presets
from hbmtwin.dashboard.app.language import text
from hbmtwin.dashboard.app.settings_link import settings_of
from hbmtwin.dashboard.app.wrong import show_wrong
from hbmtwin.sim.phrases import Phrase
from hbmtwin.sim.server_plan import ServerPlan

SETTINGS, GENERATION, ADDRESS = "settings", "generation", "set"
MOST_UPLOAD_BYTES = 1 << 20
"""Of a scenario file: the longest that anybody wrote by hand has 4 kB."""
MOST_NUMBER = 2**53 - 1
"""The largest whole number that a browser counts with."""

UPLOAD = Phrase("Scenario file (TOML)", "场景文件（TOML，最大 1 MiB）")
TOO_LARGE = Phrase("{name}: larger than 1 MiB is no scenario file", "{name}：超过 1 MiB，不是场景文件")
LINES = Phrase("Any other key, one `section.key=value` a line", "其他参数，每行一个 `section.key=value`")
LINES_HELP = Phrase(
    "As --set takes them: kv_cache.block_size=16. An empty box leaves all at its default.",
    "与 --set 的写法相同：kv_cache.block_size=16。留空则全部取默认值。",
)
APPLY = Phrase("Apply", "应用")
DEFAULT = Phrase("default", "默认")
BUILT_IN = Phrase("built-in chat traffic", "内置对话流量")
SERVED = Phrase("What is served, on what", "模型与设备")
POLICY = Phrase("KV memory", "KV 显存策略")
TRAFFIC = Phrase("Traffic", "流量")
LIMITS = Phrase("Engine", "引擎")
PROMISED = Phrase("Promised (SLO)", "服务目标（SLO）")
MORE = Phrase("All settings", "全部设置")
OWN = Phrase("of its own keys", "自定义")


class Knob(NamedTuple):
    """A key of the scenario, with what it is called here and how it is turned."""

    key: str
    label: Phrase | str
    """A name that engines have for it is the same in every language."""
    options: Callable[[], Sequence[str]] | None = None
    """Names to choose from; none: a number."""
    none: Phrase | None = None
    """What no value is called, where that may be chosen."""
    least: float | None = None
    most: float | None = None
    step: float | None = None


GROUPS: tuple[tuple[Phrase, tuple[Knob, ...]], ...] = (
    (
        SERVED,
        (
            Knob("model.name", Phrase("Model", "模型"), models),
            Knob("device.name", Phrase("Device", "设备"), devices),
            Knob("engine.tensor_parallel_size", "tensor_parallel_size", least=1, step=1),
        ),
    ),
    (POLICY, (Knob("kv_cache.preset", Phrase("Policy", "策略"), lambda: list(PRESETS), OWN),)),
    (
        TRAFFIC,
        (
            Knob("workload.preset", Phrase("Preset", "预设"), lambda: list(workload_presets()), BUILT_IN),
            Knob("workload.num_prompts", Phrase("Requests", "请求总数"), none=DEFAULT, least=1, step=50),
            Knob("workload.users", Phrase("Users (closed loop)", "用户数（闭环）"), none=DEFAULT, least=1, step=1),
            Knob(
                "workload.request_rate",
                Phrase("Sessions a second (open loop)", "每秒会话数（开环）"),
                none=DEFAULT,
                least=0.001,
                step=0.1,
            ),
            Knob("seed", Phrase("Seed", "随机种子"), least=0, step=1),
        ),
    ),
    (
        LIMITS,
        (
            Knob("engine.max_model_len", "max_model_len", none=DEFAULT, least=2, step=512),
            Knob("scheduler.max_num_seqs", "max_num_seqs", least=1, step=1),
            Knob(
                "scheduler.max_num_batched_tokens",
                "max_num_batched_tokens",
                least=1,
                step=512,
            ),
            Knob(
                "engine.gpu_memory_utilization",
                "gpu_memory_utilization",
                least=0.05,
                most=1.0,
                step=0.01,
            ),
        ),
    ),
    (
        PROMISED,
        (
            Knob("slo.ttft_s", Phrase("TTFT at most (s)", "TTFT 上限（s）"), none=DEFAULT, least=0.001, step=0.1),
            Knob("slo.tpot_s", Phrase("TPOT at most (s)", "TPOT 上限（s）"), none=DEFAULT, least=0.001, step=0.01),
        ),
    ),
)
BY_KEY = {knob.key: knob for _, knobs in GROUPS for knob in knobs}


def settings() -> tuple[str, ...]:
    """Those of the session; at its first step those of the address."""
    if SETTINGS not in st.session_state:
        st.session_state[SETTINGS] = tuple(st.query_params.get_all(ADDRESS))
        st.session_state[GENERATION] = 0
    said: tuple[str, ...] = st.session_state[SETTINGS]
    return said


def take(said: tuple[str, ...]) -> None:
    """Let *said* be the session's settings, and every knob show them."""
    st.session_state[SETTINGS] = said
    st.session_state[GENERATION] = st.session_state.get(GENERATION, 0) + 1


def choose() -> Scenario | None:
    """Draw the knobs; return the scenario, or None after saying why no server starts with it."""
    said = settings()
    scenario = None
    try:
        scenario = Scenario.load(overrides=said)
        ServerPlan(scenario)
        usable = True
    except (ScenarioError, CatalogError, DoesNotFit) as error:
        show_wrong(error)
        usable = False
    shown = scenario or Scenario.load()
    with st.sidebar:
        for title, knobs in GROUPS:
            with st.expander(text(title), expanded=title is not PROMISED):
                for knob in knobs:
                    _draw(knob, shown)
        with st.expander(text(MORE)):
            _lines(said)
            _upload()
    if scenario is not None:
        st.query_params[ADDRESS] = list(settings_of(scenario))
    return scenario if usable else None


def _draw(knob: Knob, scenario: Scenario) -> None:
    section, _, name = knob.key.rpartition(".")
    value = getattr(getattr(scenario, section) if section else scenario, name)
    widget = f"{knob.key}#{st.session_state[GENERATION]}"
    turned: dict[str, Any] = {"key": widget, "on_change": _turned, "args": (knob.key, widget)}
    label = knob.label if isinstance(knob.label, str) else text(knob.label)
    if knob.options is not None:
        names: list[str | None] = [*([None] if knob.none else []), *knob.options()]
        if value not in names:
            names.append(value)
        none = text(knob.none) if knob.none else ""
        st.selectbox(label, names, index=names.index(value), format_func=lambda n: none if n is None else n, **turned)
    else:
        whole = isinstance(knob.step, int)
        kind: Callable[[Any], Any] = int if whole else float
        if value is not None and _can_show(knob, value):
            shown: dict[str, Any] = {"value": kind(value)}
        else:
            shown = {"value": None, "placeholder": text(DEFAULT) if value is None else str(value)}
        st.number_input(
            label,
            min_value=None if knob.least is None else kind(knob.least),
            max_value=None if knob.most is None else kind(knob.most),
            step=kind(knob.step),
            **(shown | turned),
        )


def _can_show(knob: Knob, value: float) -> bool:
    """Whether a box for numbers takes it: a rate may be infinite, and an address may say anything."""
    low = -MOST_NUMBER if knob.least is None else knob.least
    high = MOST_NUMBER if knob.most is None else knob.most
    return low <= value <= high


def _turned(key: str, widget: str) -> None:
    """A knob was turned: its setting replaces the one that was there."""
    value = st.session_state[widget]
    if (none := BY_KEY[key].none) is not None and value in (none.en, none.zh):
        value = st.session_state[widget] = None  # a browser may still say it in the language before
    said = [setting for setting in st.session_state[SETTINGS] if setting.partition("=")[0].strip() != key]
    if key == "kv_cache.preset" and value is not None:
        governed = {name for keys in PRESETS.values() for name in keys}
        said = [setting for setting in said if setting.partition("=")[0].strip() not in governed]
    if key == "workload.users":
        said = [setting for setting in said if not setting.startswith("workload.request_rate=")]
    if key == "workload.request_rate":
        said = [setting for setting in said if not setting.startswith("workload.users=")]
    if value is not None:
        said.append(f"{key}={value}")
    st.session_state[SETTINGS] = tuple(said)


def _lines(said: tuple[str, ...]) -> None:
    """Every setting as text, to be changed at will."""
    with st.form(key=f"lines#{st.session_state[GENERATION]}", border=False):
        typed = st.text_area(text(LINES), "\n".join(said), help=text(LINES_HELP), height=140, max_chars=20_000)
        if st.form_submit_button(text(APPLY)):
            take(tuple(line.strip() for line in (typed or "").splitlines() if line.strip()))
            st.rerun()


def _upload() -> None:
    """Read a scenario file: text that is parsed, never run."""
    file = st.file_uploader(
        text(UPLOAD),
        type=["toml"],
        key=f"upload#{st.session_state[GENERATION]}",
        max_upload_size=MOST_UPLOAD_BYTES >> 20,
    )
    if file is None:
        return
    if file.size > MOST_UPLOAD_BYTES:
        st.error(text(TOO_LARGE, name=file.name))
        return
    try:
        said = settings_of_file(file.name, file.getvalue())
    except (ScenarioError, CatalogError) as error:
        show_wrong(error)
    else:
        take(said)
        st.rerun()


def settings_of_file(name: str, content: bytes) -> tuple[str, ...]:
    """The settings of an uploaded scenario file. Raise ScenarioError, in which the file has its own name."""
    with TemporaryDirectory(prefix="hbmtwin-") as folder:
        path = Path(folder, "scenario.toml")
        path.write_bytes(content)
        try:
            return settings_of(Scenario.load(path))
        except ScenarioError as error:
            raise ScenarioError(str(error).replace(str(path), name)) from None

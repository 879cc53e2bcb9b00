"""The headings of an explanation and what stands around its sentences: the same on a terminal and in the app.

::

    SAYS, WHY, HELPS, USELESS, GO_ON    headings          CAUSE, WHEN, NAMES    the cause in one line
    WRITTEN, NOT_WRITTEN, CAN_WRITE     of the scenario file
"""

from __future__ import annotations

from hbmtwin.allocators.oom import Cause
from hbmtwin.sim.phrases import Phrase

SAYS = Phrase("What it says", "文本内容")
WHY = Phrase("Why", "原因")
CAUSE = Phrase("cause: {cause} ({name}){when}", "原因类型：{cause}（{name}）{when}")
NO_CAUSE = Phrase(
    "cause: not a shortage that the text gives figures for{when}", "原因类型：文本没有给出可判断的显存数字{when}"
)
NOT_SETTLED = Phrase("cause: one of two{when}", "原因类型：两者之一{when}")
ANOTHER = Phrase("Also (line {line}): {said}", "另外（第 {line} 行）：{said}")
MORE = Phrase("{count} more failures are in the JSON", "另有 {count} 个失败，见 JSON 输出")
BOOKS = Phrase("The books", "显存账目")
HELPS = Phrase("What helps (any one of them, unless it says otherwise)", "有效的办法（除非另有说明，任选其一）")
TRIED = Phrase(
    "Tried by the memory budget (hbmtwin fit): any one of these lines makes it start",
    "经显存规划（hbmtwin fit）验证，以下任意一行即可启动",
)
CHECKED = Phrase("The memory budget beside it", "与显存规划对照")
USELESS = Phrase("What does not help", "无效的办法")
NOT_READ = Phrase("Not read", "未读懂的部分")
GO_ON = Phrase("Go on with", "下一步")
WRITTEN = Phrase("wrote {path}: hbmtwin fit {path}", "已写入 {path}：hbmtwin fit {path}")
NOT_WRITTEN = Phrase(
    "no scenario was written: the text tells neither model, device nor a setting",
    "没有写场景文件：文本中没有模型、设备或参数",
)
CAN_WRITE = Phrase(
    "--scenario FILE.toml writes what is known as a scenario file", "加 --scenario FILE.toml 可把已知信息写成场景文件"
)
WHEN = {
    "start_up": Phrase(", at start-up", "，启动阶段"),
    "run_time": Phrase(", at run time", "，推理阶段"),
}
NAMES = {
    Cause.NEVER_FITS: Phrase("it can never fit", "永远放不下"),
    Cause.ALLOCATOR_RULE: Phrase("a rule of the allocator", "分配器规则"),
    Cause.EXTERNAL_FRAGMENTATION: Phrase("fragmentation", "显存碎片"),
    Cause.GROWTH_COPY: Phrase("old copies of growing buffers", "增长缓冲区的旧副本"),
    Cause.RESERVATION: Phrase("reserved and not filled", "预留未用"),
    Cause.PARKED_HISTORY: Phrase("kept conversations", "保留的历史会话"),
    Cause.OTHER_TENANT: Phrase("another process", "其他进程"),
    Cause.RUNTIME_PEAK: Phrase("a peak of the step", "单步峰值"),
    Cause.SHORTAGE: Phrase("plain shortage", "显存不足"),
}
"""What a cause is called beside its identifier."""

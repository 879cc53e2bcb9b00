"""What a KV cache is, for whoever does not know: ``fit`` and ``explain`` both say it, the latter without a budget."""

from __future__ import annotations

from hbmtwin.sim.phrases import Phrase

WHAT_IS_KV = Phrase(
    "The KV cache is where the engine keeps what it has read and written of every running request: it decides how many "
    "run at once.",
    "KV 缓存存放每个运行中请求已读入和已生成的内容，它的大小决定能同时运行多少请求。",
)

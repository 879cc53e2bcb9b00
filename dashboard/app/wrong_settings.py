"""What is wrong with one setting by itself, in both languages: its form, its kind, its bounds, its name.

The English is what :mod:`hbmtwin.sim.scenario`, pydantic, ``tomllib`` and the registries raise.
"""

from __future__ import annotations

from hbmtwin.sim.phrases import Phrase

SETTINGS = (
    # the form of a setting, and of a file
    Phrase("write it as section.key=value", "请写成 section.key=value"),
    Phrase("nested too deeply for a value", "嵌套过深，不能作为取值"),
    Phrase("nested too deeply for a scenario", "嵌套过深，不是场景文件"),
    Phrase(
        "a whole number of more than 77 digits counts nothing; write a smaller one",
        "整数超过 77 位，没有意义；请写较小的数",
    ),
    Phrase(
        "not valid TOML: {what} (at line {line}, column {column})",
        "不是有效的 TOML：{what}（第 {line} 行第 {column} 列）",
    ),
    Phrase("not valid TOML: {what} (at end of document)", "不是有效的 TOML：{what}（文件末尾）"),
    Phrase("Invalid value", "取值无效"),
    Phrase("Invalid statement", "语句无效"),
    Phrase("Invalid initial character for a key part", "键名以无效字符开头，其他文字须加引号"),
    Phrase("Invalid date or datetime", "日期或时间无效"),
    Phrase("Invalid hex value", "十六进制转义无效"),
    Phrase("Expected '=' after a key in a key/value pair", "键名之后缺少 “=”"),
    Phrase("Expected newline or end of document after a statement", "语句之后应换行或结束"),
    Phrase("Expected ']' at the end of a table declaration", "表头末尾缺少 “]”"),
    Phrase("Expected ']]' at the end of an array declaration", "数组表头末尾缺少 “]]”"),
    Phrase("Unterminated string", "字符串没有结束"),
    Phrase("Unclosed array", "数组没有结束"),
    Phrase("Unclosed inline table", "内联表没有结束"),
    Phrase("Unescaped '\\' in a string", "字符串中有未转义的 “\\”"),
    Phrase("Cannot overwrite a value", "同一个键写了两次"),
    Phrase("Cannot declare {name} twice", "{name} 声明了两次"),
    Phrase("Duplicate inline table key {name}", "内联表中 {name} 写了两次"),
    Phrase("Expected 'True' or 'False'", "须为 'True' 或 'False'"),
    Phrase("Expected {token}", "缺少 {token}"),
    Phrase("Found invalid character {letter}", "字符 {letter} 无效"),
    Phrase("Illegal character {letter}", "不允许字符 {letter}"),
    Phrase(
        "cannot be read: {codec} codec can't decode byte {byte} in position {at}: {what}",
        "无法读取：不是 UTF-8 文本（{codec}，位置 {at} 的字节 {byte}：{what}）",
    ),
    Phrase(
        "cannot be read: {codec} codec can't decode bytes in position {at}: {what}",
        "无法读取：不是 UTF-8 文本（{codec}，位置 {at} 的字节：{what}）",
    ),
    Phrase("invalid start byte", "起始字节无效"),
    Phrase("invalid continuation byte", "后续字节无效"),
    Phrase("unexpected end of data", "数据不完整"),
    Phrase("no such file", "没有此文件"),
    Phrase("cannot be read: [Errno 2] No such file or directory: {path}", "无法读取：没有文件 {path}"),
    Phrase("cannot be read: [Errno 21] Is a directory: {path}", "无法读取：{path} 是目录"),
    Phrase("cannot be read: [Errno 36] File name too long: {path}", "无法读取：文件名过长 {path}"),
    Phrase("cannot be read: embedded null byte", "无法读取：文件名含有零字节"),
    # names of keys
    Phrase("unknown key", "没有此参数"),
    Phrase(
        "this is a section; write its keys, {first} = ... and so on, not {value}",
        "这是一个分节；请写其中的参数，如 {first} = ...，不能是 {value}",
    ),
    Phrase("{section} is a value, not a section", "{section} 是一个取值，不是分节"),
    Phrase("field required, not {value}", "缺少此参数，已给出 {value}"),
    Phrase(
        "--set says {wanted} where {preset} is to run; leave it out of --set",
        "已设为 {wanted}，而要运行的是 {preset}；请删去此项",
    ),
    # the kind of a value
    Phrase("input should be a valid integer", "须为整数"),
    Phrase("input should be a valid number", "须为数值"),
    Phrase("input should be a valid string", "须为文本"),
    Phrase("input should be a valid boolean", "须为 true 或 false"),
    Phrase("input should be a valid list", "须为列表"),
    Phrase("input should be greater than or equal to {least}", "须大于或等于 {least}"),
    Phrase("input should be less than or equal to {most}", "须小于或等于 {most}"),
    Phrase("input should be greater than {bound}", "须大于 {bound}"),
    Phrase("input should be less than {bound}", "须小于 {bound}"),
    Phrase("input should be {names} or {last}", "须为 {names} 或 {last}"),
    Phrase("input should be 1", "须为 1"),
    Phrase("string should have at least 1 character", "不能为空"),
    Phrase("list should have at least 1 item after validation, not 0, not {value}", "列表不能为空，不能是 {value}"),
    Phrase("write a table, {{ name = value }}", "须为表 {{ name = value }}"),
    Phrase(
        "write a number, or a table such as {{ distribution = ... }}", "须为数值，或形如 {{ distribution = ... }} 的表"
    ),
    Phrase(
        "write bytes as a number, or with a unit such as 512MiB or 29.5GiB",
        "字节数须为数值，或带单位，如 512MiB、29.5GiB",
    ),
    # names of things
    Phrase(
        "unknown model {name}: did you mean {near}? The catalog has {count} (`hbmtwin catalog models` lists them). "
        "Any Hugging Face model works from disk: give the path of its config.json (nothing is downloaded)",
        "没有模型 {name}：是否指 {near}？目录中有 {count} 个（`hbmtwin catalog models` 列出全部）。其他 Hugging Face "
        "模型请给出其 config.json 的路径（不会下载任何内容）",
    ),
    Phrase(
        "unknown model {name}: The catalog has {count} (`hbmtwin catalog models` lists them). Any Hugging Face model "
        "works from disk: give the path of its config.json (nothing is downloaded)",
        "没有模型 {name}：目录中有 {count} 个（`hbmtwin catalog models` 列出全部）。其他 Hugging Face 模型请给出其 "
        "config.json 的路径（不会下载任何内容）",
    ),
    Phrase("model {path}, line {line}: {what}", "模型 {path} 第 {line} 行：{what}"),
    Phrase("model : no such file", "模型名为空：没有此文件"),
    Phrase("model {path}: {what}", "模型 {path}：{what}"),
    Phrase(
        "unknown device {name}: did you mean {near}? The catalog has {known}",
        "没有设备 {name}：是否指 {near}？目录中有 {known}",
    ),
    Phrase("unknown device {name}: The catalog has {known}", "没有设备 {name}：目录中有 {known}"),
    Phrase(
        "unknown workload {name}: did you mean {near}? The catalog has {known}",
        "没有流量预设 {name}：是否指 {near}？目录中有 {known}",
    ),
    Phrase("unknown workload {name}: The catalog has {known}", "没有流量预设 {name}：目录中有 {known}"),
    Phrase("no preset is called {name} (there are {known})", "没有名为 {name} 的预设（有 {known}）"),
    Phrase("no scheduler is called {name} (there are {known})", "没有名为 {name} 的调度器（有 {known}）"),
    Phrase("no device allocator is called {name} (there are {known})", "没有名为 {name} 的显存分配器（有 {known}）"),
    Phrase("no KV policy is called {name} (there are {known})", "没有名为 {name} 的 KV 策略（有 {known}）"),
    Phrase("no growth rule is called {name} (there are {known})", "没有名为 {name} 的增长规则（有 {known}）"),
    Phrase("{text} is no retention; write one of {known}", "没有保留规则 {text}；可写 {known}"),
    Phrase("{text}: write {form}, each number a whole number of tokens", "{text}：请写成 {form}，其中均为整数个 token"),
    Phrase(
        "unknown {key} {name}: did you mean {near}? Known are {known}", "没有 {key} {name}：是否指 {near}？可用 {known}"
    ),
    Phrase("unknown {key} {name}: Known are {known}", "没有 {key} {name}：可用 {known}"),
    Phrase(
        "no profile {name} comes along; did you mean {near}? there are: {known}; a file's name ends in .json",
        "没有自带的校准 {name}；是否指 {near}？自带 {known}；文件名须以 .json 结尾",
    ),
    Phrase(
        "no profile {name} comes along; there are: {known}; a file's name ends in .json",
        "没有自带的校准 {name}；自带 {known}；文件名须以 .json 结尾",
    ),
    Phrase(
        "profile {name} was made on {device}, not on {other}; take one of it",
        "校准 {name} 测于 {device}，不是 {other}；请换用后者的校准",
    ),
    # further settings of a policy, and of the caching allocator
    Phrase("{name} has a key of its own; write it as {key}", "{name} 有自己的参数；请写成 {key}"),
    Phrase("{name} is no further setting of the policy {policy}", "{name} 不是策略 {policy} 的其他设置"),
    Phrase("Unrecognized key {key} in {device} allocator config", "{device} 分配器配置没有 {key}"),
    Phrase(
        "`max_split_size_mb` or `garbage_collection_threshold`, cannot be enabled with `expandable_segments`; set "
        "expandable_segments:False first (a refused setting is not rolled back)",
        "`max_split_size_mb` 或 `garbage_collection_threshold` 不能与 `expandable_segments` 同时启用；请先设置 "
        "expandable_segments:False",
    ),
    Phrase(
        "garbage_collect_threshold is invalid, set it in (0.0, 1.0), not {value}",
        "garbage_collection_threshold 须在 (0.0, 1.0) 之间，不能是 {value}",
    ),
    Phrase("large_segment_size_mb must be > 10 MB, not {value}", "large_segment_size_mb 须大于 10 MB，不能是 {value}"),
    Phrase(
        "{key} too small, must be >= {least} (large_segment_size_mb), not {value}",
        "{key} 过小，至少为 {least}（large_segment_size_mb），不能是 {value}",
    ),
    Phrase(
        "base_addr_aligned_kb error, must be [0~16], dtype is int, not {value}",
        "base_addr_aligned_kb 须为 0 到 16 的整数，不能是 {value}",
    ),
    Phrase(
        "Unsupported page_size value: {value}; only page_size:1g exists",
        "不支持 page_size 取值 {value}；只有 page_size:1g",
    ),
    Phrase(
        "segment_size_mb error, must be [20, 512], dtype is int, not {value}",
        "segment_size_mb 须为 20 到 512 的整数，不能是 {value}",
    ),
    Phrase(
        "per_process_memory_fraction is invalid, set it in [0.0, 1.0], not {value}",
        "per_process_memory_fraction 须在 0.0 到 1.0 之间，不能是 {value}",
    ),
    Phrase(
        "pinned_num_register_threads has to be a power of 2 of at most 128, not {value}",
        "pinned_num_register_threads 须为不超过 128 的 2 的幂，不能是 {value}",
    ),
    Phrase(
        "backend:{value} is another allocator, which is not modelled; leave it at native",
        "backend:{value} 是另一种分配器，尚未建模；请保留 native",
    ),
    Phrase("Expected a single True/False argument for {key}, not {value}", "{key} 须为 True 或 False，不能是 {value}"),
    Phrase(
        "INTERNAL ASSERT FAILED (as torch calls it): the text ends where a value should be: write key:value, "
        "separated by commas",
        "INTERNAL ASSERT FAILED（torch 的原文）：文本在应有取值处结束：请写成 key:value，以逗号分隔",
    ),
    Phrase(
        "INTERNAL ASSERT FAILED (as torch calls it): a list has no closing ']'",
        "INTERNAL ASSERT FAILED（torch 的原文）：列表缺少 ']'",
    ),
    Phrase(
        "must be a power of two, not {value}; use {lower} or {higher} (512 is torch's unit)",
        "须为 2 的幂，不能是 {value}；请用 {lower} 或 {higher}（torch 的单位是 512）",
    ),
    Phrase(
        "{wanted} blocks do not fit, {blocks} do by the plan: leave it out, or raise engine.gpu_memory_utilization",
        "放不下 {wanted} 块，按规划可放 {blocks} 块：请删去，或增大 engine.gpu_memory_utilization",
    ),
    Phrase("the divisions has to be power of 2, not {value}", "份数须为 2 的幂，不能是 {value}"),
    Phrase("the intervals have to be power of 2, not {value}", "区间须为 2 的幂，不能是 {value}"),
    Phrase("{text} does not begin with a whole number", "{text} 不以整数开头"),
    Phrase("{text} is out of the range of 64 bits", "{text} 超出 64 位范围"),
    Phrase("{text} does not begin with a number", "{text} 不以数字开头"),
    Phrase("{text} is out of the range of a double", "{text} 超出 double 范围"),
    Phrase("{key} must be from {low} to {high}, not {value}", "{key} 须在 {low} 到 {high} 之间，不能是 {value}"),
    Phrase("{key} must be at least {least}, not {value}", "{key} 至少为 {least}，不能是 {value}"),
    Phrase(
        "page_bytes must be a multiple of {unit}, not {value}; drivers give 2 MiB",
        "page_bytes 须为 {unit} 的倍数，不能是 {value}；驱动提供 2 MiB",
    ),
)
"""Whole sentences, the special before the general."""

JOINED = (
    Phrase("{said}, not {value}", "{said}，不能是 {value}"),
    Phrase("{said}; did you mean {near}?", "{said}；是否指 {near}？"),
    Phrase("must be one of {known}", "须为 {known} 之一"),
)
"""What joins a sentence and what follows it: tried before all others, which may end with a place."""

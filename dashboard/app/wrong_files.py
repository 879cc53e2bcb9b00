"""What is wrong with a file that a setting names, in both languages: traces, learned models, profiles, models.

The English is what :mod:`hbmtwin.workloads.formats`, :mod:`hbmtwin.kernels.profile`, the catalog's reader of models and
``json`` raise.
"""

from __future__ import annotations

from hbmtwin.sim.phrases import Phrase

FILES = (
    Phrase("no such file; known are {known}", "没有此文件；该目录中有 {known}"),
    Phrase("no such file; check the path", "没有此文件；请检查路径"),
    Phrase(
        "cannot be read (Is a directory); check the path and its permissions",
        "无法读取（是目录）；请检查路径和权限",
    ),
    Phrase(
        "cannot be read (File name too long); check the path and its permissions",
        "无法读取（文件名过长）；请检查路径和权限",
    ),
    Phrase(
        "{path}: no file has such a name (embedded null byte); check the path",
        "{path}：没有文件叫这个名字（含有零字节）；请检查路径",
    ),
    Phrase(
        "this is no regular file, and a trace is read more than once; write it to a file",
        "这不是普通文件，而 trace 要读取多次；请写入文件",
    ),
    Phrase("no trace format {name}; did you mean {near}?", "没有 trace 格式 {name}；是否指 {near}？"),
    Phrase("no trace format {name}; known are {known}", "没有 trace 格式 {name}；可用 {known}"),
    Phrase("the file is empty; it needs a header such as {example}", "文件为空；须有表头，如 {example}"),
    Phrase("this is a zip archive; unpack it first", "这是 zip 压缩包；请先解压"),
    Phrase("no requests in it; it has a header only", "没有请求；只有表头"),
    Phrase("no requests in it behind the first {skipped}", "跳过前 {skipped} 条之后没有请求"),
    Phrase(
        "no known column in {columns}; write {example}, or one of the formats {known}",
        "{columns} 中没有已知的列；请写 {example}，或用以下格式之一：{known}",
    ),
    Phrase("no column {name}; is it {other}?", "没有列 {name}；是否为 {other}？"),
    Phrase("no column {name}; {what} needs {example}", "没有列 {name}；{what}需要 {example}"),
    Phrase("a file of requests", "请求文件"),
    Phrase("a file of agents' calls", "agent 调用文件"),
    Phrase("an Azure trace", "Azure 格式的 trace "),
    Phrase("a Qwen-Bailian trace", "Qwen-Bailian 格式的 trace "),
    Phrase("a BurstGPT trace", "BurstGPT 格式的 trace "),
    Phrase("a Mooncake trace", "Mooncake 格式的 trace "),
    Phrase("a custom data set of vLLM", "vLLM 自定义数据集"),
    Phrase("a splitwise-sim trace", "splitwise-sim 格式的 trace "),
    Phrase("a Vidur file", "Vidur 文件"),
    Phrase("a ShareGPT-style file of lengths", "ShareGPT 式的长度文件"),
    Phrase("a benchmark's log of requests", "压测请求日志"),
    Phrase("a file of weka lines", "weka 格式文件"),
    Phrase("unknown column {name}; did you mean {near}?", "未知的列 {name}；是否指 {near}？"),
    Phrase("unknown column {name}; known are {known}", "未知的列 {name}；可用 {known}"),
    Phrase("two columns are called {name}; remove one", "有两列名为 {name}；请删去一列"),
    Phrase(
        "{fields} fields where the header has {width}; write {header}",
        "有 {fields} 个字段，而表头有 {width} 个；请写成 {header}",
    ),
    Phrase("{name} is {value}; it must be a whole number", "{name} 为 {value}；须为整数"),
    Phrase(
        "{name} is {value}; it must be at least {least}; drop lines of failed calls",
        "{name} 为 {value}；至少为 {least}；请删去失败调用的行",
    ),
    Phrase(
        "{name} is {value}; it must be a finite number of seconds, not negative",
        "{name} 为 {value}；须为有限的秒数，不能为负",
    ),
    Phrase(
        "{name} is {value}; it must be at most {most} seconds; is it in milliseconds?",
        "{name} 为 {value}；不能超过 {most} 秒；单位是毫秒吗？",
    ),
    Phrase("{name} is {value}; it must be a number of seconds", "{name} 为 {value}；须为秒数"),
    Phrase("{name} is {value}; it must be at most {most}", "{name} 为 {value}；不能超过 {most}"),
    Phrase(
        "{name} is {seconds} s before line {line}; sort the file by {column}",
        "{name} 比第 {line} 行早 {seconds} s；请按 {column} 排序",
    ),
    Phrase("this is not UTF-8 text; save the file as UTF-8", "这不是 UTF-8 文本；请存为 UTF-8"),
    Phrase(
        "this is a JSON array; write one object a line; texts such as ShareGPT's must be counted in tokens first",
        "这是 JSON 数组；请每行写一个对象；ShareGPT 之类的文本须先统计 token 数",
    ),
    Phrase("the gzip file ends early; fetch or write it again", "gzip 文件不完整；请重新下载或写入"),
    Phrase(
        "at a time_scale of {scale} it lasts over 146 years; lower it",
        "time_scale 为 {scale} 时持续超过 146 年；请减小",
    ),
    Phrase(
        "this is no JSON ({what}); write an object such as {example}",
        "这不是 JSON（{what}）；请写对象，如 {example}",
    ),
    Phrase(
        "this is no TOML ({what} (at end of document)); is it a model of hbmtwin workload learn?",
        "这不是 TOML（{what}，文件末尾）；是 `hbmtwin workload learn` 写出的模型吗？",
    ),
    Phrase(
        "this is no TOML ({what} (at line {line}, column {column})); is it a model of hbmtwin workload learn?",
        "这不是 TOML（{what}，第 {line} 行第 {column} 列）；是 `hbmtwin workload learn` 写出的模型吗？",
    ),
    Phrase("not JSON ({what}); check the file", "不是 JSON（{what}）；请检查文件"),
    Phrase(
        "not JSON: {what}; `hbmtwin calibrate` writes profiles",
        "不是 JSON（{what}）；校准由 `hbmtwin calibrate` 写出",
    ),
    Phrase("{what}: line {line} column {column} (char {at})", "{what}（第 {line} 行第 {column} 列，第 {at} 个字符）"),
    Phrase("Expecting value", "缺少取值"),
    Phrase("Extra data", "末尾有多余内容"),
    Phrase("Expecting property name enclosed in double quotes", "键须用双引号括起"),
    Phrase("Expecting {token} delimiter", "缺少分隔符 {token}"),
    Phrase("Unterminated string starting at", "字符串没有结束"),
    Phrase("missing; `hbmtwin calibrate` writes profiles", "缺少此项；校准由 `hbmtwin calibrate` 写出"),
    Phrase(
        "{value} is not of the right kind; `hbmtwin calibrate` writes profiles",
        "{value} 的类型不对；校准由 `hbmtwin calibrate` 写出",
    ),
    Phrase("no valid JSON: {what}", "不是有效的 JSON：{what}"),
    Phrase("must be a JSON object, not {kind}", "须为 JSON 对象，不能是 {kind}"),
    Phrase("{key} is missing", "缺少 {key}"),
    Phrase("{key} is the text {value}; write the number without quotes", "{key} 是文本 {value}；请写数值，不加引号"),
    Phrase(
        "{key} must be a whole number from {low} to {high}, not {value}",
        "{key} 须为 {low} 到 {high} 的整数，不能是 {value}",
    ),
    Phrase("{key} must be true or false, not {value}", "{key} 须为 true 或 false，不能是 {value}"),
    Phrase(
        "num_key_value_heads {kv} does not divide num_attention_heads {heads}: each KV head serves the same number "
        "of heads",
        "num_key_value_heads {kv} 不能整除 num_attention_heads {heads}：每个 KV 头对应相同数量的注意力头",
    ),
    Phrase(
        "head_dim is missing, and hidden_size {hidden} is no multiple of {heads} heads",
        "缺少 head_dim，而 hidden_size {hidden} 不是 {heads} 个头的倍数",
    ),
    Phrase("encoder-decoder models are not computed", "不计算编码器-解码器模型"),
    Phrase("dtype {name} comes with a later release; known: {known}", "dtype {name} 尚未支持；可用 {known}"),
    Phrase(
        "sliding_window must be a whole number of tokens from 1 to {most}, not {value}",
        "sliding_window 须为 1 到 {most} 的整数个 token，不能是 {value}",
    ),
    Phrase(
        "quantised weights of quant_method {method} are not computed; known are {known}",
        "不计算 quant_method {method} 的量化权重；可用 {known}",
    ),
    Phrase(
        "layer_types has {count} entries for {layers} num_hidden_layers",
        "layer_types 有 {count} 项，而 num_hidden_layers 为 {layers}",
    ),
    Phrase("larger than 1 MiB, so this is no config.json", "超过 1 MiB，不是 config.json"),
)
"""Whole sentences behind the file that they name, the special before the general."""

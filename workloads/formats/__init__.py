"""Traffic in files: traces of requests in many formats, read as one kind of row, replayed, and written.

::

    file -> lines -> reader -> rows -> replay      requests of a trace, opened by traces.open_trace
                     format                        one of each: azure, bailian, burstgpt, mooncake, ...
    file <- whole_file <- write_requests, mooncake

A new format is one more file here, and one more in the list of :mod:`hbmtwin.workloads.formats.traces`. Two files
are no traces of requests: ``multi_turn`` reads the input of vLLM's benchmark, ``memory_trace`` calls of an allocator.
"""

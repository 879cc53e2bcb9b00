"""A server with little room for KV and traffic of seconds: what a test of a whole verb can afford."""

TINY = """
[engine]
max_model_len = 1024
gpu_memory_utilization = 0.5
[kv_cache]
tensors = "merged"
[workload]
num_prompts = 10
prompt_tokens = { distribution = "uniform", low = 10, high = 300 }
output_tokens = 220
system_prompt_tokens = 0
[session]
turns = 1
[results]
interval_s = 1e6
"""
"""1.8 GiB for KV: of doubling, 7 users of ten are too many."""

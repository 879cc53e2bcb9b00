"""vLLM's own block manager and scheduler beside ours: traffic, both sides, comparison, planted mistakes."""

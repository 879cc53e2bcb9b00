"""A verb that takes the words of vLLM's benchmarks beside its own options."""

from __future__ import annotations

import sys
from typing import Any

from typer.core import TyperCommand

from hbmtwin.cli.bench_words import move

HELP = (
    "Words of `vllm bench serve` set the traffic too: --request-rate, --burstiness, --max-concurrency, --num-prompts, "
    "--ramp-up-strategy, --ramp-up-start-rps, --ramp-up-end-rps, --dataset-name (random, sharegpt, burstgpt, custom, "
    "prefix_repetition), --dataset-path, --random-input-len, --random-output-len, --random-range-ratio, "
    "--random-prefix-len, --goodput ttft:500 tpot:50; and of its multi-turn benchmark --input-file, --num-clients, "
    "--max-num-requests. See docs/workloads.md."
)


class BenchCommand(TyperCommand):
    """A command whose benchmark words become ``--set`` before its options are read."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the words over, and tell of those that could not be."""
        moved = move(args)
        for note in moved.notes:
            print(f"note: {note}", file=sys.stderr)
        return super().parse_args(ctx, moved.arguments)

"""Traffic that needs no file: chat sessions with a shared system prompt, arriving in bursts.

What it imitates, and where the figures come from:

- answers: the quantiles of the Azure 2023 conversation trace (Patel et al., Splitwise, ISCA 2024; CC-BY-4.0),
  measured on its 19,366 requests;
- what a user adds in a turn: median 120 tokens, mean about 290, our assumption (that trace's prompts hold the whole
  history, which is made here by the turns themselves);
- bursts: that trace is Poisson within minutes, its busiest seconds are 2.9 times its mean and its minutes far more
  uneven than Poisson's; here a cycle of three minutes holds one burst of 45 s at 2.5 times the mean;
- turns: 58 % of the sessions have one, one in a hundred has 13; mean 2.5, like the chat log WildChat;
- think time: median 22 s, mean 35 s (the same source);
- system prompt: 400 tokens, our assumption.
"""

from __future__ import annotations

from hbmtwin.workloads.arrivals import Arrivals, Bursts
from hbmtwin.workloads.conversations import Conversations
from hbmtwin.workloads.lengths import Quantiles
from hbmtwin.workloads.open_loop import OpenLoop
from hbmtwin.workloads.think_times import LogNormalTime

NUM_PROMPTS = 600
REQUEST_RATE = 0.5
"""Sessions a second."""
SYSTEM_PROMPT_TOKENS = 400
BURSTS = Bursts(every_s=180, length_s=45, factor=2.5)
THINK_TIME = LogNormalTime(mean_s=35, sigma=0.96)
_PROBABILITIES = (0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 0.999)
PROMPT_TOKENS = Quantiles(_PROBABILITIES, (8, 16, 24, 50, 120, 300, 700, 1100, 1800, 2600))
OUTPUT_TOKENS = Quantiles(_PROBABILITIES, (16, 41, 54, 85, 129, 395, 424, 451, 601, 954))
TURNS = Quantiles((0.57, 0.59, 0.75, 0.9, 0.95, 0.99, 0.999), (1, 2, 3, 5, 7, 13, 20))


def builtin(*, seed: int = 0, num_prompts: int = NUM_PROMPTS, request_rate: float = REQUEST_RATE) -> OpenLoop:
    """The built-in workload; more requests make it longer, a higher rate makes it denser. Raise WorkloadError."""
    conversations = Conversations(
        seed=seed,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        turns=TURNS,
        think_time=THINK_TIME,
        system_prompt_tokens=SYSTEM_PROMPT_TOKENS,
    )
    return OpenLoop(conversations, Arrivals(request_rate, bursts=BURSTS), num_prompts=num_prompts)

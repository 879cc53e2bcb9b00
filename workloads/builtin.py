"""Traffic that needs no file: chat sessions with a shared system prompt, arriving in bursts.

What it imitates, and where the figures come from:

- answers: the quantiles of the Azure 2023 conversation trace (Patel et al., Splitwise, ISCA 2024; CC-BY-4.0),
  measured on its 19,366 requests;
- what a user adds in a turn: median 120 tokens, mean about 290, our assumption (that trace's prompts hold the whole
  history, which is made here by the turns themselves);
- bursts: that trace is Poisson within minutes (CV in windows of 5 minutes 0.99 to 1.19), and its mean drifts by 2-3
  times from window to window; at its rate of 5.53 a second the counts of 1, 10 and 60 s have a variance of 1.4, 3.9 and
  16 times their mean. Here 25 minutes hold 20 at 1.12 times the mean and a lull of 0.52 times;
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
BURSTS = Bursts(every_s=1500, length_s=1200, factor=1.12)
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

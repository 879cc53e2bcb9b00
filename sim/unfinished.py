"""Why requests of a run were never made: each with the sentence that says what became of them."""

from __future__ import annotations

import pandas as pd

NOT_SENT = "the run ended before they were sent"
AFTER_REJECTION = "an earlier turn of their session was rejected"
AFTER_FAILURE = "what they were to follow was in the server when the run ended"
AFTER_EITHER = "what they were to follow was rejected, or in the server when the run ended"


def unfinished_because(requests: pd.DataFrame, total: int | None) -> dict[str, int]:
    """How many requests were never sent, by reason; they sum to ``requests_unfinished``. O(requests).

    Those that a source would have sent have a row that says so; later turns of a session that ended early have none,
    and the difference to *total* counts them.
    """
    status = requests["status"]
    unsent = int((status == "unfinished").sum())
    never_made = 0 if total is None else total - len(requests)
    rejected, failed = bool((status == "rejected").any()), bool((status == "failed").any())
    why = AFTER_EITHER if rejected and failed else AFTER_FAILURE if failed else AFTER_REJECTION
    return {reason: count for reason, count in ((NOT_SENT, unsent), (why, never_made)) if count}

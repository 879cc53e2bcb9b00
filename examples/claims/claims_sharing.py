"""The claim of write-up C on pages that sequences share."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from claim import GIB, HERE, MIB, Found, claim

from hbmtwin import Scenario
from hbmtwin.kernels.records import BatchShape, CostModel
from hbmtwin.kernels.step_times import StepTimes
from hbmtwin.sim.run import Twin

V1 = ('kv_cache.version="0.27"', "scheduler.policy=vllm")
C9_ENGINES = {
    "v0, forked": (),
    "v1, prefix cache": (*V1, "kv_cache.enable_prefix_caching=true"),
    "nothing shared": V1,
}
"""What shares pages, and the keys that differ from the scenario's."""
PAGE, SAMPLES, PROMPT, OUTPUT = 16, 8, 1000, 200


class Copies:
    """A cost model that counts the bytes copied, and passes everything on."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.basis = cost.basis
        self.copied_bytes = 0

    def steps(self, b: BatchShape) -> StepTimes:
        """As the cost model's."""
        return self.cost.steps(b)

    def work_ns(self, *, driver_calls: int, syncs: int, copied_bytes: int, swapped_bytes: int) -> int:
        """As the cost model's; the bytes copied are counted."""
        self.copied_bytes += copied_bytes
        return self.cost.work_ns(
            driver_calls=driver_calls, syncs=syncs, copied_bytes=copied_bytes, swapped_bytes=swapped_bytes
        )


class Pages(NamedTuple):
    """Of one run, in pages."""

    held: tuple[int, ...]
    """After each step."""
    copied: int
    computed_prompt_tokens: int
    page_bytes: int

    @property
    def most(self) -> int:
        """When most was held."""
        return max(self.held)


@cache
def c9_pages(engine: str, *, prompt: int = PROMPT, samples: int = SAMPLES, output: int = OUTPUT) -> Pages:
    """Run samples of one prompt and count."""
    keys = (f"workload.prompt_tokens={prompt}", f"workload.samples={samples}", f"workload.output_tokens={output}")
    twin = Twin(Scenario.load(HERE / "c9.toml", overrides=[*keys, *C9_ENGINES[engine]]))
    twin.cost = counted = Copies(twin.cost)
    result = twin.run()
    assert result.summary["requests_completed"] == samples
    assert result.summary["preemptions"] == 0
    page_bytes = PAGE * twin.layout.token_bytes
    line = result.timeline
    held = (line["kv_tokens"] + line["kv_unfilled"]).tolist()
    found = int(result.requests["cached_tokens"].sum())
    pages = tuple(int(size) // page_bytes for size in held)
    return Pages(pages, counted.copied_bytes // page_bytes, samples * prompt - found, page_bytes)


def c9_formula(engine: str, prompt: int, samples: int, output: int) -> tuple[int, int]:
    """Pages held at the last token, and pages copied, worked out.

    The last token of an answer is sampled and never stored. Shared are the full pages of the prompt; a prefix cache
    leaves the prompt's last token to compute, and so its page, where that is the last of a full page.
    """
    stored = prompt + output - 1
    own = samples * -(-stored // PAGE)
    if engine == "nothing shared":
        return own, 0
    forked = engine == "v0, forked"
    shared = (prompt if forked else prompt - 1) // PAGE
    copied = samples - 1 if forked and prompt % PAGE and output > 1 else 0
    return own - (samples - 1) * shared, copied


@claim(
    "C9",
    "Copy-on-write lets sequences share pages.",
    picture="KV held against the number of answers, and the pages of eight answers in their first steps",
)
def c9() -> Found:
    """Pages of eight answers to one prompt, forked, found by a prefix cache, and each for itself."""
    runs = {engine: c9_pages(engine) for engine in C9_ENGINES}
    even = {engine: c9_pages(engine, prompt=1008) for engine in C9_ENGINES}
    for prompt, found in ((PROMPT, runs), (1008, even)):
        for engine, pages in found.items():
            assert (pages.most, pages.copied) == c9_formula(engine, prompt, SAMPLES, OUTPUT)
    forked, cached, alone = runs.values()
    page_mib = forked.page_bytes // MIB
    saved = (alone.most - forked.most) * forked.page_bytes
    in_order = [even[engine] for engine in ("nothing shared", "v0, forked", "v1, prefix cache")]
    brief = cached.held[1] - forked.held[1]
    return Found(
        "holds in part",
        f"8 answers of 200 tokens to one prompt of 1,000, pages of 16: nothing shared {alone.most} pages, "
        f"{alone.most * alone.page_bytes / GIB:.2f} GiB; forked, with copy-on-write (v0), {forked.most}, "
        f"{forked.most * forked.page_bytes / GIB:.2f} GiB, {forked.copied} pages of {page_mib} MiB copied; prefix "
        f"cache, without copy-on-write (v1), {cached.most}, none copied. {saved / GIB:.2f} GiB saved, in both: 7 x 62 "
        f"pages. With a prompt of 1,008 tokens, 63 full pages: {', '.join(str(pages.most) for pages in in_order)}",
        "What shares pages is that references to them are counted; full pages are never written again, and need no "
        f"copy. Copy-on-write shares the prompt's last page, too, if it is partly filled: {brief} pages less, for one "
        "step, until each answer writes its first token and all but one copy it. The prefix cache computes "
        f"{cached.computed_prompt_tokens - forked.computed_prompt_tokens} prompt tokens more, and where the prompt "
        "fills its last page shares one page less with each answer, since it computes the last token anew.",
        "Pages are shared because references to them are counted, and a full page is never written again, so no copy "
        "is ever needed: vLLM's present engine shares the same pages without copy-on-write. What copy-on-write adds is "
        "the partly filled page at a prompt's end, shared for the one step in which the prompt is computed. It also "
        "spares the prompts of further answers altogether, where a prefix cache computes their last page anew. Samples "
        "that were swapped to the host and back share nothing any more. Try it with `--set workload.samples=16`.",
    )

"""vLLM's own Scheduler as one side of the comparison: its options, its requests, and what it is told of each step.

::

    ours        arrive          schedule        compute
    vLLM's      add_request     schedule        update_from_output, with a token of each that has computed all its own
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hbmtwin.validation.vllm.manager import cache_of
from hbmtwin.validation.vllm.sides import Pool, Tables
from hbmtwin.validation.vllm.steps import Computed, Scheduled, Server
from hbmtwin.workloads.records import Request

END = -1
"""The token that ends an answer before it has all that it may."""


class VllmOwnScheduler:
    """vLLM's unmodified Scheduler with its own KVCacheManager; each option that it reads is given, or it stops."""

    def __init__(self, core: Mapping[str, Any], server: Server) -> None:
        pool = server.pool
        cache, whole, hash_block_size, self.hasher = cache_of(core, pool)
        self.request = core["request"].Request
        self.scheduler = self.kind(core)(
            _config(server),
            cache,
            SimpleNamespace(should_advance=lambda request, new_token_ids: False),
            whole,
            hash_block_size,
            mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda config: False),
        )
        self.tokens: dict[str, Sequence[int]] = {}
        self.output: Any = None

    @staticmethod
    def kind(core: Mapping[str, Any]) -> Any:
        """The class of the scheduler."""
        return core["scheduler"].Scheduler

    def arrive(self, r: Request, tokens: Sequence[int]) -> None:
        """``add_request``; names sort as the numbers do."""
        name = f"{r.id:09}"
        asked = SimpleNamespace(
            max_tokens=r.max_tokens,
            min_tokens=0,
            eos_token_id=END,
            stop_token_ids=(),
            repetition_detection=None,
            num_logprobs=None,
            extra_args=None,
            skip_reading_prefix_cache=None,
        )
        self.tokens[name] = tokens if r.output_tokens == r.max_tokens else [*tokens[:-1], END]
        self.scheduler.add_request(
            self.request(
                name,
                list(tokens[: r.prompt_tokens]),
                asked,
                None,
                arrival_time=float(r.arrival_ns),
                priority=r.priority,
                block_hasher=self.hasher,
            )
        )

    def schedule(self) -> Scheduled:
        """``schedule``."""
        scheduler = self.scheduler
        output = self.output = scheduler.schedule()
        again = output.scheduled_cached_reqs
        hits = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        both = zip(again.req_ids, again.num_computed_tokens, strict=True)
        hits |= {name: computed for name, computed in both if name in again.resumed_req_ids}
        scheduled = output.num_scheduled_tokens
        return Scheduled(
            scheduled=tuple((int(name), int(new)) for name, new in scheduled.items()),
            admitted=tuple((int(name), int(hits[name])) for name in scheduled if name in hits),
            preempted=tuple(sorted(map(int, output.preempted_req_ids))),
            rejected=(),
            running=self.running(),
            waiting=tuple(int(request.request_id) for queue in self.queues() for request in queue),
            tables=tuple(self.tables(request.request_id) for request in scheduler.running),
            free_queue=self.free_queue(),
        )

    def compute(self) -> Computed:
        """``update_from_output``, with a token of each that has computed all of its own."""
        requests = self.scheduler.requests
        names = self.output.num_scheduled_tokens
        done = {name for name in names if requests[name].num_computed_tokens == requests[name].num_tokens}
        return self.tell(self.output, done)

    def tell(self, output: Any, sampled: Collection[str]) -> Computed:
        """``update_from_output``, with the next token of each of *sampled*; whoever has ended gets one that is none of
        its own."""
        names, requests = list(output.num_scheduled_tokens), self.scheduler.requests
        tokens = [
            [self.tokens[name][requests[name].num_tokens] if name in requests else END] if name in sampled else []
            for name in names
        ]
        answers = self.scheduler.update_from_output(
            output,
            SimpleNamespace(
                req_ids=names,
                req_id_to_index={name: place for place, name in enumerate(names)},
                sampled_token_ids=tokens,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                num_nans_in_logits=None,
                kv_connector_output=None,
                cudagraph_stats=None,
                routed_experts=None,
            ),
        )
        ended = [one.request_id for outputs in answers.values() for one in outputs.outputs if one.finish_reason]
        for name in ended:
            del self.tokens[name]
        return Computed(finished=tuple(map(int, ended)), running=self.running(), free_queue=self.free_queue())

    def running(self) -> tuple[int, ...]:
        """Its running list."""
        return tuple(int(request.request_id) for request in self.scheduler.running)

    def queues(self) -> tuple[Any, Any]:
        """Skipped ones, of which there are none here, stand before those that wait."""
        return self.scheduler.skipped_waiting, self.scheduler.waiting

    def tables(self, name: str) -> Tables:
        """Its block tables."""
        return tuple(map(tuple, self.scheduler.kv_cache_manager.get_block_ids(name)))

    def free_queue(self) -> tuple[int, ...]:
        """The free queue from its head."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        return tuple(block.block_id for block in queue.get_all_free_blocks())


def _mamba_cache_mode(pool: Pool) -> str:
    return next((group.mamba_mode for group in pool.groups if group.kind == "mamba"), "none")


def _config(server: Server) -> SimpleNamespace:
    """What its VllmConfig would say: one device, no drafts, no connector, nothing sent or measured."""
    pool = server.pool
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=server.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            max_num_scheduled_tokens=None,
            policy=server.scheduling_policy,
            long_prefill_token_threshold=server.long_prefill_token_threshold,
            enable_chunked_prefill=server.enable_chunked_prefill,
            scheduler_reserve_full_isl=pool.reserve_full_sequence,
            watermark=pool.watermark,
            async_scheduling=server.async_scheduling,
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks=pool.num_blocks,
            enable_prefix_caching=pool.caching,
            mamba_cache_mode=_mamba_cache_mode(pool),
            block_size=pool.aligned_block,  # read in mode align only
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=0,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            max_model_len=pool.max_model_len,
            is_encoder_decoder=False,
            is_diffusion=False,
            enable_return_routed_experts=False,
        ),
        observability_config=SimpleNamespace(kv_cache_metrics=False),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        num_speculative_tokens=0,
        max_in_flight_tokens=server.in_flight_tokens,
        use_v2_model_runner=False,
    )

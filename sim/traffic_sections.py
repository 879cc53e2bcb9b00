"""The tables of a scenario file that say who asks for how much, and when: each key with its type, default and bounds.

::

    workload                    traffic: from a file, by name, or drawn
      clients                   open traffic of several, each with its own rate and lengths
      prefix_buckets, ...       what prompts begin with
    session                     conversations of several turns
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hbmtwin.sim.sections import Section

LengthSpec = Annotated[int, Field(ge=1)] | dict[str, Any]
"""Tokens: a number, or a table such as ``{distribution = "lognormal", mean = 1155, sigma = 0.9, max = 4096}``."""

ThinkTimeSpec = Annotated[float, Field(ge=0)] | dict[str, Any]
"""Seconds: a number, or a table such as ``{distribution = "exponential", mean = 20}``."""


class ClientSection(Section):
    """One client of open traffic; what it leaves out is said for all in ``[workload]`` and ``[session]``."""

    request_rate: float = Field(gt=0, le=1e9, description="its sessions a second")
    arrival_pattern: Literal["constant", "poisson", "gamma", "weibull"] | None = Field(
        None, description="family of its gaps; default: gamma"
    )
    burstiness: float = Field(1.0, ge=0.01, description="shape of its gaps; 1: Poisson")
    cv: float | None = Field(None, ge=0, description="coefficient of variation of its gaps, in place of burstiness")
    prompt_tokens: LengthSpec | None = Field(None, description="new prompt tokens of a turn")
    first_prompt_tokens: LengthSpec | None = Field(None, description="those of a first turn")
    output_tokens: LengthSpec | None = Field(None, description="output tokens of a turn")
    system_prompt_tokens: int = Field(0, ge=0, le=2**40, description="its own, behind the one that all share")
    turns: LengthSpec | None = Field(None, description="turns of its sessions")
    think_time_s: ThinkTimeSpec | None = Field(None, description="time from an answer to the next turn")


class PrefixBucketSection(Section):
    """Prefixes of one kind, in GuideLLM's words."""

    prefix_tokens: LengthSpec = Field(description="length of each prefix")
    prefix_count: int = Field(1, ge=1, le=10**6, description="prefixes in this bucket")
    bucket_weight: float = Field(1.0, gt=0, le=1e9, description="how often it is drawn, against the other buckets")


class SharedPrefixSection(Section):
    """Prompts of inference-perf's ``shared_prefix``."""

    num_groups: int = Field(ge=1, le=10**6, description="prefixes")
    num_prompts_per_group: int = Field(ge=1, le=10**6, description="prompts with a prefix, in the mean")
    system_prompt_len: int = Field(ge=1, le=2**40, description="tokens of each prefix")
    question_len: int = Field(ge=1, le=2**40, description="tokens behind it")
    output_len: int = Field(ge=1, le=2**40, description="tokens of an answer")


class PrefixRepetitionSection(Section):
    """Prompts of vLLM's data set ``prefix_repetition``."""

    prefix_len: int = Field(ge=1, le=2**40, description="tokens of each prefix")
    suffix_len: int = Field(ge=1, le=2**40, description="tokens behind it")
    num_prefixes: int = Field(ge=1, le=10**6, description="prefixes")
    output_len: int = Field(ge=1, le=2**40, description="tokens of an answer")


class WorkloadSection(Section):
    """Who asks for how much, and when."""

    preset: str | None = Field(
        None, description="traffic by name (`hbmtwin catalog workloads`): what is not given here and in [session]"
    )
    trace: str | None = Field(
        None,
        min_length=1,
        description="request file to replay: Azure, Mooncake, BurstGPT ... or our own, gzip or plain",
    )
    trace_format: str | None = Field(
        None, min_length=1, description="format of the trace; none: told by its columns (azure, mooncake, burstgpt ...)"
    )
    trace_block_size: int | None = Field(
        None, ge=1, le=2**20, description="tokens that a hash_id of the trace stands for; none: as its format has it"
    )
    trace_jitter: bool = Field(
        False, description="requests that share a tick of the trace's clock (Mooncake: 3 s) are spread over it"
    )
    trace_skip: int = Field(
        0,
        ge=0,
        le=10**9,
        description="requests of the trace that are left out at its beginning; the next one arrives at 0",
    )
    skip_bad_lines: bool = Field(False, description="leave out and count lines of the trace that are no request")
    keep_failed: bool = Field(False, description="send calls that failed in the trace too, each for one token")
    model: str | None = Field(
        None, min_length=1, description="learned model to draw requests from, as `hbmtwin workload learn` writes it"
    )
    rate_scale: float = Field(1.0, gt=0, le=1e6, description="factor on the rates of a model")
    multi_turn: str | None = Field(
        None,
        min_length=1,
        description="JSON of vLLM's multi-turn benchmark; users are its clients, request_rate is that of a client",
    )
    users: int | None = Field(None, ge=1, le=10**6, description="closed loop: users that wait for their answer")
    request_rate: float | None = Field(
        None, gt=0, description="open loop: sessions that arrive per second; inf: all at once"
    )
    max_concurrency: int | None = Field(
        None, ge=1, description="most requests in the server; others wait at the client, and arrive when they are sent"
    )
    arrival_pattern: Literal["constant", "poisson", "gamma", "weibull"] | None = Field(
        None, description="open loop: family of the gaps; default: gamma, which is Poisson with burstiness 1"
    )
    burstiness: float = Field(
        1.0,
        ge=0.01,
        description="open loop: shape of gamma and Weibull gaps; 1: Poisson, less: burstier, inf: constant",
    )
    cv: float | None = Field(
        None, ge=0, description="open loop: coefficient of variation of the gaps, in place of burstiness"
    )
    rate_curve: list[list[float]] | None = Field(
        None,
        description="open loop: [[seconds, factor], ...] on request_rate, with straight lines between; it repeats",
    )
    ramp_up_strategy: Literal["linear", "exponential"] | None = Field(
        None,
        description="open loop: the rate moves with the request's number, as vLLM's flag; in place of request_rate",
    )
    ramp_up_start_rps: float | None = Field(None, gt=0, description="ramp: requests a second at the first request")
    ramp_up_end_rps: float | None = Field(None, gt=0, description="ramp: requests a second at the last request")
    rescale_gaps: bool = Field(
        False,
        description="open loop: stretch the gaps so that the last session arrives at N / request_rate, as vLLM does",
    )
    num_prompts: int | None = Field(
        None, ge=1, le=10**9, description="requests in all; of a trace: its first ones, behind trace_skip"
    )
    time_scale: float = Field(1.0, gt=0, le=1e9, description="factor on the times of a trace")
    samples: int = Field(1, ge=1, le=1024, description="answers to each prompt (n), each a request; turns must be 1")
    prompt_tokens: LengthSpec | None = Field(None, description="new prompt tokens of a turn")
    first_prompt_tokens: LengthSpec | None = Field(
        None, description="those of a session's first turn, without the system prompt; none: as prompt_tokens"
    )
    output_tokens: LengthSpec | None = Field(None, description="output tokens of a turn")
    system_prompt_tokens: int | None = Field(None, ge=0, le=2**40, description="prefix that every prompt shares")
    prefix_tokens: LengthSpec | None = Field(
        None, description="prefix of a group of sessions, behind the system prompt: its length, drawn for each prefix"
    )
    prefix_count: int | None = Field(
        None, ge=1, le=10**6, description="prefixes, of which a session begins with one; default with prefix_tokens: 1"
    )
    prefix_buckets: list[PrefixBucketSection] | None = Field(
        None, description="prefixes of several kinds: [{ bucket_weight, prefix_count, prefix_tokens }, ...]"
    )
    distinct_prompts: int | None = Field(
        None, ge=1, le=10**9, description="after so many sessions their first prompts come again; none: all are new"
    )
    shared_prefix: SharedPrefixSection | None = Field(
        None,
        description="inference-perf's prompts: { num_groups, num_prompts_per_group, system_prompt_len, question_len, "
        "output_len }",
    )
    prefix_repetition: PrefixRepetitionSection | None = Field(
        None, description="vLLM's prompts: { prefix_len, suffix_len, num_prefixes, output_len }"
    )
    clients: list[ClientSection] | None = Field(
        None, description="open loop: clients with rates, gaps and lengths of their own: [{ request_rate, ... }, ...]"
    )
    priorities: list[Annotated[float, Field(ge=0, le=1e9)]] | None = Field(
        None,
        min_length=1,
        description="weights with which sessions get priority 0 (goes first), 1, ...; none: all have 0",
    )


class SessionSection(Section):
    """Conversations of several turns."""

    between_turns: Literal["keep", "drop", "prefix_cache"] = Field(
        "drop", description="what happens to a session's KV until its next turn"
    )
    turns: LengthSpec | None = Field(None, description="turns of a session")
    think_time_s: ThinkTimeSpec | None = Field(
        None, description="time from an answer to the next turn: seconds, or a table like those of tokens"
    )

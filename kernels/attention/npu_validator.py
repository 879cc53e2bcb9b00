"""Holds a call of a torch_npu op to the limits that its documents state, before it is made.

::

    check_call(op, arguments, family="a2")
        known op, known names --> soc --> rules of the op, in order --> first broken: KernelArgumentError
                                                                        op: argument: the rule; the cure

The ops accept most of these mistakes and read wild memory or attend to something else. Knows no torch; the rules stand
in ``npu_rules_fia``, ``npu_rules_flash``, ``npu_rules_cache``. A limit that the documents do not state is not here, and
none of them was tried on an NPU: the device's word is the last.

Complexity: O(rules + sequences), and O(blocks in use) where values of a table are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hbmtwin.kernels.attention import npu_rules_cache, npu_rules_fia, npu_rules_flash
from hbmtwin.kernels.attention.npu_310p import IFA, PFA
from hbmtwin.kernels.attention.npu_asked import Asked, Rule
from hbmtwin.kernels.attention.npu_cache import DYNAMIC_QUANT, PAGED_ATTENTION, RESHAPE_AND_CACHE, SCATTER
from hbmtwin.kernels.attention.npu_fia import FIA, FIA_V2, FUSION
from hbmtwin.kernels.attention.npu_rules_cache import LATENT_ATTENTION, QUANTIZE, RMSNORM_ROPE_CACHE
from hbmtwin.kernels.attention.validator import KernelArgumentError

RULES: dict[str, tuple[Rule, ...]] = {**npu_rules_fia.RULES, **npu_rules_flash.RULES, **npu_rules_cache.RULES}
"""By op, in the order in which they are asked."""

A2_A3, ALL = ("a2", "a3"), ("a2", "a3", "310p")
FAMILIES: dict[str, tuple[str, ...]] = {
    FIA: A2_A3,
    FIA_V2: A2_A3,
    FUSION: A2_A3,
    PFA: ALL,
    IFA: ALL,
    PAGED_ATTENTION: ALL,
    RESHAPE_AND_CACHE: ALL,
    SCATTER: A2_A3,
    LATENT_ATTENTION: A2_A3,
    RMSNORM_ROPE_CACHE: A2_A3,
    QUANTIZE: ALL,
    DYNAMIC_QUANT: ALL,
}
"""Which families an op is for. ``npu_fusion_attention``: A2 by its table, A3 since vllm-ascend calls it there."""

_ATTENTION = "query key value atten_mask input_layout sparse_mode inner_precise"
_FIA_ONLY = "query_rope key_rope block_table block_size num_key_value_heads pre_tokens next_tokens pse_shift"
ARGUMENTS: dict[str, frozenset[str]] = {
    op: frozenset(names.split())
    for op, names in {
        FIA: f"{_ATTENTION} {_FIA_ONLY} actual_seq_lengths actual_seq_lengths_kv dequant_scale1 quant_scale1 "
        "dequant_scale2 quant_scale2 quant_offset2 antiquant_scale antiquant_offset key_antiquant_scale "
        "key_antiquant_offset value_antiquant_scale value_antiquant_offset query_padding_size kv_padding_size "
        "key_shared_prefix value_shared_prefix actual_shared_prefix_len key_rope_antiquant_scale num_heads scale "
        "antiquant_mode key_antiquant_mode value_antiquant_mode softmax_lse_flag",
        FIA_V2: f"{_ATTENTION} {_FIA_ONLY} actual_seq_qlen actual_seq_kvlen dequant_scale_query dequant_scale_key "
        "dequant_offset_key dequant_scale_value dequant_offset_value dequant_scale_key_rope quant_scale_out "
        "quant_offset_out quant_scale_p learnable_sink num_query_heads softmax_scale query_quant_mode key_quant_mode "
        "value_quant_mode return_softmax_lse",
        FUSION: f"{_ATTENTION} head_num pse padding_mask scale keep_prob pre_tockens next_tockens prefix "
        "actual_seq_qlen actual_seq_kvlen gen_mask_parallel sync softmax_layout sink dropout_mask seed offset",
        PFA: "query key value padding_mask atten_mask pse_shift actual_seq_lengths deq_scale1 quant_scale1 deq_scale2 "
        "quant_scale2 quant_offset2 num_heads scale_value pre_tokens next_tokens input_layout num_key_value_heads "
        "actual_seq_lengths_kv sparse_mode",
        IFA: "query key value padding_mask atten_mask pse_shift actual_seq_lengths antiquant_scale antiquant_offset "
        "block_table dequant_scale1 quant_scale1 dequant_scale2 quant_scale2 quant_offset2 kv_padding_size num_heads "
        "scale_value input_layout num_key_value_heads block_size inner_precise",
        PAGED_ATTENTION: "query key_cache value_cache num_kv_heads num_heads scale_value block_table context_lens out "
        "workspace",
        RESHAPE_AND_CACHE: "key value key_cache value_cache slot_indices",
        SCATTER: "key value key_cache value_cache slot_mapping compress_lens compress_seq_offsets seq_lens cache_mode",
        LATENT_ATTENTION: "q_nope q_rope ctkv k_rope block_tables context_lens q_headnum qk_scale kv_headnum mask "
        "qseqlen qk_descale pv_descale mask_type calc_type cache_mode",
        RMSNORM_ROPE_CACHE: "kv gamma cos sin index k_cache ckv_cache k_rope_scale c_kv_scale k_rope_offset "
        "c_kv_offset v epsilon cache_mode is_output_kv",
        QUANTIZE: "input scales zero_points dtype axis div_mode",
        DYNAMIC_QUANT: "input smooth_scales group_index dst_type quant_mode dst_type_max",
    }.items()
}
"""What each op is given by name; of version 2 of FIA without the reserved ones that end in ``_dtype``."""


def check_call(
    op: str,
    arguments: Mapping[str, Any],
    *,
    family: str,
    known: Mapping[str, Sequence[int]] | None = None,
    cann: tuple[int, ...] | None = None,
) -> None:
    """Hold one call to the op's limits on devices of *family*. Raises KernelArgumentError.

    *known* holds the values of tensors on the device, flat, as far as the host has them (``block_table``, slots); ids
    are looked at only where they are given. *cann* is the installed version, for arguments that came late.
    """
    if op not in RULES:
        raise KernelArgumentError(op, f"is no op that is known here; known are {', '.join(RULES)}")
    for name in arguments:
        if name not in ARGUMENTS[op]:
            raise KernelArgumentError(name, f"{op} has no such argument; it has {', '.join(sorted(ARGUMENTS[op]))}")
    if family not in FAMILIES[op]:
        raise KernelArgumentError(
            op, f"is for {' and '.join(FAMILIES[op])}, and this is {family}; take another op, or another device"
        )
    asked = Asked(op, arguments, family=family, known=known, cann=cann)
    rule = broken_rule(asked)
    if rule is not None:
        name = asked.name(rule.argument) or rule.argument
        raise KernelArgumentError(name, f"{op}: {rule.text.format(a=asked)}; {rule.cure}")


def broken_rule(asked: Asked) -> Rule | None:
    """The first rule that a call of a known op with known arguments breaks."""
    return next((rule for rule in RULES[asked.op] if rule.broken(asked)), None)

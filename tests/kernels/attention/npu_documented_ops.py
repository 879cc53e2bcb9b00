"""torch_npu's attention ops as its documents describe them, on the CPU: what our calls are tried on."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hbmtwin.kernels.attention.npu_fia import IN_V2


def plain(sums: list[int]) -> list[int]:
    return [high - low for low, high in pairwise([0, *sums])]


class DocumentedOps:
    """The ops as torch_npu's documents describe them, one sequence at a time, in float32."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def npu_fused_infer_attention_score_v2(self, **renamed: Any) -> Any:
        back = {new: old for old, new in IN_V2.items()}
        return self.npu_fused_infer_attention_score(**{back.get(name, name): value for name, value in renamed.items()})

    def npu_fused_infer_attention_score(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        num_heads: int,
        num_key_value_heads: int,
        input_layout: str,
        scale: float,
        atten_mask: Any = None,
        actual_seq_lengths: Any = None,
        actual_seq_lengths_kv: Any = None,
        block_table: Any = None,
        block_size: int = 0,
        sparse_mode: int = 0,
        pre_tokens: int = 2147483647,
        next_tokens: int = 2147483647,
        key_antiquant_scale: Any = None,
        value_antiquant_scale: Any = None,
        key_antiquant_mode: int = 0,
        value_antiquant_mode: int = 0,
        query_rope: Any = None,
        key_rope: Any = None,
    ) -> Any:
        if query_rope is not None:
            query, key = self.torch.cat((query, query_rope), -1), self.torch.cat((key, key_rope), -1)
        if input_layout == "TND":
            queries = list(query.split(plain(actual_seq_lengths)))
        else:
            queries = [row.transpose(0, 1) if input_layout == "BNSD" else row for row in query]
        one = input_layout != "TND" and queries[0].shape[0] == 1
        if block_table is not None:
            assert (key_antiquant_mode, value_antiquant_mode) in ((0, 0), (4, 4), (5, 5))
            keys = self.blocks(key, key_antiquant_scale, num_key_value_heads, block_table, actual_seq_lengths_kv)
            values = self.blocks(value, value_antiquant_scale, num_key_value_heads, block_table, actual_seq_lengths_kv)
        elif input_layout == "TND":
            lens = plain(actual_seq_lengths_kv)
            keys, values = list(key.split(lens)), list(value.split(lens))
        else:
            both = (x.transpose(1, 2) if input_layout == "BNSD" else x for x in (key, value))
            keys, values = ([row[:n] for row, n in zip(x, actual_seq_lengths_kv, strict=True)] for x in both)
        done = []
        for i, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
            if one:
                outside = None if atten_mask is None else atten_mask[i, 0, :, : k.shape[0]]
            else:
                outside = self.compressed(atten_mask, sparse_mode, pre_tokens, next_tokens, len(q), len(k))
            done.append(self.attention(q, k, v, scale, outside))
        if input_layout == "TND":
            return self.torch.cat(done), None
        made = self.torch.stack(done)
        return (made.transpose(1, 2) if input_layout == "BNSD" else made), None

    def npu_fusion_attention(self, query: Any, key: Any, value: Any, head_num: int, **given: Any) -> Any:
        made, _ = self.npu_fused_infer_attention_score(
            query,
            key,
            value,
            num_heads=head_num,
            num_key_value_heads=key.shape[1],
            input_layout=given["input_layout"],
            scale=given["scale"],
            atten_mask=given["atten_mask"],
            sparse_mode=given["sparse_mode"],
            pre_tokens=given.get("pre_tockens", 2147483647),
            next_tokens=given.get("next_tockens", 2147483647),
            actual_seq_lengths=given["actual_seq_qlen"],
            actual_seq_lengths_kv=given["actual_seq_kvlen"],
        )
        return made, None, None, None, 0, 0, 0

    def npu_prompt_flash_attention(
        self, query: Any, key: Any, value: Any, *, atten_mask: Any, next_tokens: int = 0, **given: Any
    ) -> Any:
        assert given["input_layout"] == "BNSD"
        assert "num_key_value_heads" not in given
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        at = self.torch.arange(len(k)).unsqueeze(0) - self.torch.arange(len(q)).unsqueeze(1)
        return self.attention(q, k, v, given["scale_value"], atten_mask | (at > next_tokens)).transpose(0, 1)[None]

    def npu_incre_flash_attention(
        self, *, actual_seq_lengths: Any, scale_value: float, num_heads: int, **given: Any
    ) -> Any:
        made, _ = self.npu_fused_infer_attention_score(
            actual_seq_lengths_kv=actual_seq_lengths, scale=scale_value, num_heads=num_heads, **given
        )
        return made

    def _npu_paged_attention(self, *, query: Any, out: Any, context_lens: Any, **given: Any) -> None:
        lens = context_lens.tolist()
        keys, values = (
            self.blocks(given[name].flatten(2), None, given["num_kv_heads"], given["block_table"], lens)
            for name in ("key_cache", "value_cache")
        )
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            out[i] = self.attention(query[i : i + 1], k, v, given["scale_value"], None)[0]

    def npu_scatter_pa_kv_cache(
        self, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, *, cache_mode: str
    ) -> None:
        assert cache_mode == "Norm"
        for new, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:])[slot_mapping.long()] = new

    def _npu_reshape_and_cache(self, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_indices: Any) -> None:
        assert slot_indices.dtype == self.torch.int32
        kept = slot_indices >= 0
        for new, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:])[slot_indices[kept].long()] = new[kept]

    def npu_dynamic_quant(self, input: Any) -> Any:
        scale = input.float().abs().amax(-1) / 127
        return (input.float() / scale[..., None]).round().to(self.torch.int8), scale

    def blocks(self, cache: Any, scales: Any, kv_heads: int, table: Any, lens: Any) -> list[Any]:
        """The keys of each sequence, (length, Nkv, D)."""
        tokens = cache.view(*cache.shape[:2], kv_heads, -1).float()
        if scales is not None:
            tokens *= (scales[:, :, None] if scales.ndim == 2 else scales.transpose(1, 2))[..., None]
        return [
            tokens[row[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]
            for row, length in zip(table, lens, strict=True)
        ]

    def compressed(self, mask: Any, mode: int, before: int, after: int, q_len: int, kv_len: int) -> Any:
        """What a query of the sequence leaves out, its origin in the lower right corner."""
        assert mask.shape == (2048, 2048)
        assert mask.equal(self.torch.ones(2048, 2048, dtype=self.torch.bool).triu(1))
        at = self.torch.arange(kv_len).unsqueeze(0) - self.torch.arange(kv_len - q_len, kv_len).unsqueeze(1)
        return at > 0 if mode == 3 else (at > after) | (at < -before)

    def attention(self, q: Any, k: Any, v: Any, scale: float, outside: Any) -> Any:
        repeat = q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(repeat, 1) for x in (k, v))
        scores = self.torch.einsum("qnd,knd->nqk", q.float(), keys) * scale
        if outside is not None:
            scores = scores.masked_fill(outside, -self.torch.inf)
        return self.torch.einsum("nqk,knd->qnd", scores.softmax(-1), values).to(q.dtype)

    def module(self) -> SimpleNamespace:
        """What stands where ``torch_npu`` is imported."""
        return SimpleNamespace(**{name: getattr(self, name) for name in dir(self) if "npu_" in name})

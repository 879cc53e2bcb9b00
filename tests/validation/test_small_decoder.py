"""The decoder, held to a plain one: a sequence at a time, a token's attention at a time, in float64 and without blocks.

Written from what the models' papers say of a layer; it shares the weights and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, kernels_for, load
from hbmtwin.kernels.records import ModelShape, SmallParts
from hbmtwin.validation.small_decoder import EPSILON, PIECE, Sequences, SmallDecoder

LLAMA = ModelShape("toy", 3, 32, 48, 4, 2, 8, 61, 512)
MODELS = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, parts=SmallParts(qkv_bias=True), tie_word_embeddings=True),
    "qwen3": replace(LLAMA, parts=SmallParts(query_key_norm="head")),
    "olmo2": replace(LLAMA, parts=SmallParts(query_key_norm="width", norms=2), num_kv_heads=4),
    "gemma3": replace(LLAMA, parts=SmallParts(norms=4, query_key_norm="head"), layer_windows=(5, 0, 5)),
    "mistral": replace(LLAMA, layer_windows=(7, 7, 7)),
    "phi": replace(
        LLAMA,
        parts=SmallParts(norms=1, norm_bias=True, qkv_bias=True, output_bias=True, mlp_bias=True),
        gated_mlp=False,
        rotary_dim=4,
        num_kv_heads=4,
    ),
    "no rotary": replace(LLAMA, rotary_dim=0),
}


@pytest.fixture(scope="module")
def torch() -> Any:
    try:
        loaded = load("cpu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    loaded.set_num_threads(1)
    return loaded


def decoder(model: ModelShape, **sizes: Any) -> SmallDecoder:
    sizes = {"num_blocks": 40, "block_size": 4, "seed": 3, **sizes}
    made = SmallDecoder(model, kernels_for("cpu"), dtype="float64", **sizes)
    for i, layer in enumerate(made.layers):  # all alike as made; norms of ones hide which of them is applied where
        layer.qkv.mul_(1 + 0.1 * i)
        for j, vector in enumerate((layer.norms, *(layer.head_norms or ()))):
            vector.mul_(0.5 + 0.2 * j + 0.1 * i)
            vector.view(-1)[::3] *= 0.3
        for bias in (layer.norm_biases, *layer.biases):  # large ones would make every token the same
            if bias is not None:
                bias.mul_(0.1)
    return made


class Plain:
    """One sequence, token by token."""

    def __init__(self, torch: Any, made: SmallDecoder) -> None:
        self.torch, self.made, self.m = torch, made, made.model
        self.kept: list[list[tuple[Any, Any]]] = [[] for _ in made.layers]

    def norm(self, layer: Any, i: int, x: Any) -> Any:
        if layer.norm_biases is not None:
            x = x - x.mean()
        x = x / (x.pow(2).mean() + EPSILON).sqrt() * layer.norms[i]
        return x if layer.norm_biases is None else x + layer.norm_biases[i]

    def turn(self, head: Any, position: int) -> Any:
        width = self.m.head_dim if self.m.rotary_dim is None else self.m.rotary_dim
        out = head.clone()
        for i in range(width // 2):
            angle = self.torch.tensor(position / 10_000 ** (2 * i / width))
            c, s = angle.cos(), angle.sin()
            out[i], out[i + width // 2] = head[i] * c - head[i + width // 2] * s, head[i + width // 2] * c + head[i] * s
        return out

    def attention(self, at: int, layer: Any, x: Any, position: int) -> Any:
        torch, m = self.torch, self.m
        qkv = layer.qkv @ x + (layer.biases[0] if layer.biases[0] is not None else 0)
        heads = qkv.view(-1, m.head_dim)
        q, k, v = heads.split([m.num_attention_heads, m.num_kv_heads, m.num_kv_heads])
        if layer.head_norms is not None:
            per_head = m.parts.query_key_norm == "head"
            q, k = (
                (t / (t.pow(2).mean(-1 if per_head else None, keepdim=True) + EPSILON).sqrt())
                * (w if per_head else w.view_as(t))
                for t, w in zip((q, k), layer.head_norms, strict=True)
            )
        q, k = (torch.stack([self.turn(head, position) for head in t]) for t in (q, k))
        self.kept[at].append((k, v))
        window = m.layer_windows[at] if m.layer_windows else 0
        seen = self.kept[at][-window:]
        out = []
        for n in range(m.num_attention_heads):
            mine = n // (m.num_attention_heads // m.num_kv_heads)
            scores = torch.stack([q[n] @ k[mine] for k, _ in seen]) / m.head_dim**0.5
            out.append(sum(p * v[mine] for p, (_, v) in zip(scores.softmax(0), seen, strict=True)))
        attended = layer.output @ torch.cat(out)
        return attended if layer.biases[1] is None else attended + layer.biases[1]

    def mlp(self, layer: Any, x: Any) -> Any:
        torch = self.torch
        wide = layer.gate_up @ x + (layer.biases[2] if layer.biases[2] is not None else 0)
        if self.m.gated_mlp:
            gate, up = wide[: self.m.intermediate_size], wide[self.m.intermediate_size :]
            wide = gate * torch.sigmoid(gate) * up
        else:
            wide = wide * 0.5 * (1 + torch.erf(wide / 2**0.5))
        return layer.down @ wide + (layer.biases[3] if layer.biases[3] is not None else 0)

    def token(self, position: int) -> int:
        x = self.made._embedding[position * 7919 % self.m.vocab_size]
        norms = self.m.parts.norms
        for at, layer in enumerate(self.made.layers):
            attended = self.attention(at, layer, self.norm(layer, 0, x), position)
            if norms == 1:
                x = x + attended + self.mlp(layer, self.norm(layer, 0, x))
            elif norms == 4:
                x = x + self.norm(layer, 1, attended)
                x = x + self.norm(layer, 3, self.mlp(layer, self.norm(layer, 2, x)))
            else:
                x = x + attended
                x = x + self.mlp(layer, self.norm(layer, 1, x))
        x = x / (x.pow(2).mean() + EPSILON).sqrt() * self.made._norm
        return int((self.made._head @ x).argmax())


@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_decoder_is_that_of_a_plain_one(torch: Any, name: str) -> None:
    """Prompts in chunks beside others that decode: the same next tokens as token by token."""
    with torch.inference_mode():
        made = decoder(MODELS[name])
        wanted = {}
        for id_ in (7, 8):
            plain = Plain(torch, made)
            wanted[id_] = [plain.token(position) for position in range(17)]
        assert made.step(Sequences([7], [9], [0])).tolist() == [wanted[7][8]]
        found = [made.step(Sequences([7, 8], [1, 5], [9, 0])).tolist()]
        found += [made.step(Sequences([7, 8], [1, 4], [10, 5])).tolist()]
        found += [made.step(Sequences([7, 8], [1, 1], [11 + i, 9 + i])).tolist() for i in range(5)]
    # packed: those that prefill in front
    assert [tokens[1] for tokens in found[:2]] == [wanted[7][9], wanted[7][10]]
    assert [tokens[0] for tokens in found[:2]] == [wanted[8][4], wanted[8][8]]
    assert found[2:] == [[wanted[7][11 + i], wanted[8][9 + i]] for i in range(5)]
    assert len({*wanted[7]}) > 3, "all the same would say nothing"


@pytest.mark.parametrize("bug", ["window", "norm", "layers"])
def test_planted_in_the_decoder(torch: Any, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        made = decoder(MODELS["gemma3"])
        plain = Plain(torch, made)
        wanted = [plain.token(position) for position in range(17)]
        if bug == "window":
            made._windows = (6, 0, 6)
        elif bug == "norm":
            made.layers[1].norms[1].mul_(-1)
        found = [int(made.step(Sequences([0], [1], [i]), 2 if bug == "layers" else None)[0]) for i in range(17)]
    assert found != wanted


def test_blocks_are_dealt_out_in_turn_and_given_back(torch: Any) -> None:
    with torch.inference_mode():
        made = decoder(LLAMA, num_blocks=6)
        made.place_in_turn([0, 1, 2], [9, 4, 5])
        assert made._blocks == {0: [0, 3, 5], 1: [1], 2: [2, 4]}
        made.step(Sequences([0, 1, 2], [1, 1, 1], [8, 3, 4]))
        made.keep_only(())
        assert sorted(made._free) == list(range(6))


def test_no_two_rows_of_a_matrix_are_equal_and_layers_may_be_fewer(torch: Any) -> None:
    with torch.inference_mode():
        made = SmallDecoder(
            replace(LLAMA, vocab_size=70_000), kernels_for("cpu"), dtype="bfloat16", num_blocks=1, block_size=4, seed=0,
            num_layers=1,
        )  # fmt: skip
        assert len(made.layers) == 1
        rows = made._embedding
        assert rows.numel() > 2 * PIECE
        assert len({tuple(row.tolist()) for row in rows[:: PIECE // 32]}) == len(rows[:: PIECE // 32])
        assert float(rows.float().std()) == pytest.approx(32**-0.5, rel=0.05)

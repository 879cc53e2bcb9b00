"""What an engine holds beside weights and KV, computed from shapes and one version's figures.

::

    activations   the larger of two moments of the profiling run:
                      in a layer    2 T (3 I / tp + 3.4 H)                T tokens of the batch, I and H of the model
                      at the head   S V k + scratch + 2 T H               S sequences, V words, k bytes a logit
                  and c0, the workspace of routed experts, what a pipeline stage receives and sends
    non-torch     what libraries take while it profiles: by ranks, and a group for each way to split
    graphs        a base, and for each captured size a share of every layer

Sources: boot logs, named with each figure of :mod:`hbmtwin.sim.engines`; what the formula misses on those logs is
printed by ``benchmarks/overheads.py``.
"""

from __future__ import annotations

from typing import NamedTuple

from hbmtwin.kernels.activations import mixer_peak_bytes
from hbmtwin.kernels.records import DeviceSpec, ModelShape
from hbmtwin.sim.engines.figures import NOTHING, Estimate, Span, exactly
from hbmtwin.sim.engines.rules import EngineRules

SCRATCH_ROWS = 4
"""Per multiprocessor, of one byte a word each: the top-k / top-p kernel of vLLM from 0.17."""


STAGE_SPREAD = 0.06
"""Relative error of the formula for a pipeline stage, of one log."""
KERNELS_WITHOUT_WORKSPACE = ("mxfp4",)
"""Weights whose kernel for routed experts keeps no workspace: gpt-oss."""


class Ranks(NamedTuple):
    """Over how many ranks a model is split, and how."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    """Whether experts are whole on a rank each, instead of split like an MLP."""

    @property
    def of_experts(self) -> int:
        """Ranks that share a layer's experts: those of all data-parallel groups (vLLM, ``FusedMoEParallelConfig``)."""
        return self.tensor * self.data

    @property
    def of_whole_experts(self) -> int:
        """Ranks over which experts are dealt out whole; 1 where each is split like an MLP instead."""
        return self.of_experts if self.expert else 1


ALONE = Ranks()


def activation_peak(
    rules: EngineRules,
    model: ModelShape,
    device: DeviceSpec,
    *,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    num_speculative_tokens: int = 0,
    ranks: Ranks | None = None,
) -> Estimate:
    """Rise of torch's peak above the weights in the profiling run.

    The larger of two moments: inside a layer, the MLP's gate, up and product beside 3.4 hidden states, and a byte a
    value where activations are quantised; at the head, all copies of the logits (four scratch rows per multiprocessor
    among them) beside one hidden state. Logits are gathered in full width, so that more ranks do not shrink them, and
    each draft token has a row of its own. Routed experts have a workspace instead of an MLP. A Mamba-2 mixer may hold
    more than an MLP: what its code makes, beside as many hidden states, is not fitted (confidence L).

    A pipeline stage holds the hidden states and residual that it sends and receives besides, and without the head no
    logits: 1.04 GiB for a first stage whose log says 1.10 (L).
    """
    tokens, hidden, width = max_num_batched_tokens, model.hidden_size, model.dtype_bytes
    tp = tensor_parallel_size
    split = ranks or Ranks(tp)
    inner = 0 if model.experts is not None else model.intermediate_size
    mlp = (3 if model.gated_mlp else 2) * inner // tp
    layer = width * tokens * (10 * mlp + 34 * hidden) // 10
    if model.quantization is not None and model.quantization.activation_bits == 8:
        layer += tokens * max(inner // tp, hidden)
    source = rules.sources["activations"]
    if model.mamba is not None:
        mixer = mixer_peak_bytes(model.mamba, tokens, width, tp)
        layer = max(layer, mixer + width * tokens * 34 * hidden // 10)
        source += "; Mamba-2 mixers as vLLM's code makes them, not fitted (L)"
    rows = min(logits_rows(rules, max_num_seqs, num_speculative_tokens), tokens)
    scratch = SCRATCH_ROWS * device.multiprocessor_count * model.vocab_size if rules.sampler_scratch else 0
    logits = rows * model.vocab_size * (rules.logits_value_bytes + width - 2) if rules.logits_value_bytes else 0
    head = logits + scratch + width * tokens * hidden if model.last_stage else 0
    passed = (not model.first_stage) + (not model.last_stage)
    size = rules.persistent_bytes + max(layer, head) + passed * 2 * width * tokens * hidden
    spread = max(rules.activation_spread, STAGE_SPREAD if passed else 0.0)
    if model.experts is not None:
        size += expert_workspace(model, tokens, split)
        spread = max(spread, rules.moe_activation_spread)
    error = round(size * spread)
    return Estimate(size, size - error, size + error, source)


def logits_rows(rules: EngineRules, max_num_seqs: int, num_speculative_tokens: int) -> int:
    """Rows of logits of the largest batch: one a sequence, and one for each of its draft tokens."""
    rows = max_num_seqs if rules.logits_rows is None else min(max_num_seqs, rules.logits_rows)
    return rows * (1 + num_speculative_tokens)


def expert_workspace(model: ModelShape, tokens: int, ranks: Ranks) -> int:
    """What a fused kernel for routed experts holds: a row a token and expert of the input and of both inner products.

    The experts' own width is split unless each is whole on a rank.
    """
    experts, stored = model.experts, model.quantization
    if experts is None or (stored is not None and stored.method in KERNELS_WITHOUT_WORKSPACE):
        return 0
    inner = experts.intermediate_size if ranks.expert else experts.intermediate_size // ranks.of_experts
    return model.dtype_bytes * tokens * experts.experts_per_token * (model.hidden_size + 2 * inner)


def run_time_sampler(
    rules: EngineRules, model: ModelShape, *, max_num_seqs: int, num_speculative_tokens: int = 0
) -> Estimate:
    """What sampling a full batch needs when the engine serves, where no budget has it."""
    rows = logits_rows(rules, max_num_seqs, num_speculative_tokens) if model.last_stage else 0
    size = rows * model.vocab_size * rules.run_time_sampler_bytes
    return Estimate(size, 0, size, rules.sources["sampler"])


def non_torch(rules: EngineRules, model: ModelShape, ranks: Ranks) -> Estimate:
    """What libraries take outside torch while the engine profiles."""
    if ranks.tensor == 1 and ranks.pipeline > 1:
        figure = rules.pipeline_non_torch_bytes
    else:
        figure = rules.non_torch_bytes[max(tp for tp in rules.non_torch_bytes if tp <= ranks.tensor)]
    if model.experts is not None and ranks.data > 1:
        figure = figure.plus(rules.data_group_bytes)
    if model.experts is not None and ranks.expert and ranks.of_experts > 1:
        figure = figure.plus(rules.expert_group_bytes)
    return Estimate(*figure, rules.sources["non_torch"])


def context(rules: EngineRules, model: ModelShape, device: DeviceSpec, ranks: Ranks) -> Estimate:
    """What the runtime, and with several ranks a communicator for each way to split, holds before profiling."""
    groups = (ranks.tensor > 1) + (ranks.pipeline > 1)
    size = device.context_bytes + groups * rules.group_context_bytes
    if model.experts is not None and ranks.of_experts > 1:
        size += rules.moe_context_bytes
    return Estimate(size, size * 4 // 5, size * 7 // 5, device.sources.get("context_bytes", "given"))


def late_buffers(rules: EngineRules, ranks: Ranks) -> Estimate:
    """What libraries, and a pipeline's communicator, take after the plan was made, from what it leaves."""
    figure = rules.late_bytes.plus(rules.late_group_bytes if ranks.pipeline > 1 else NOTHING)
    return Estimate(*figure, rules.sources["late"])


def captured_graphs(
    rules: EngineRules,
    model: ModelShape,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_speculative_tokens: int = 0,
    ranks: Ranks = ALONE,
) -> int:
    """How many graphs the engine captures: its default sizes up to the largest batch, piecewise and in full."""
    if not rules.capture_sizes:
        return 0
    per_seq = 1 + num_speculative_tokens
    most = min(rules.largest_capture_per_seq * max_num_seqs * per_seq, rules.capture_sizes[-1], max_num_batched_tokens)
    sizes = sum(size <= most for size in rules.capture_sizes)
    if rules.graph_streams:
        groups = (ranks.data > 1) + (ranks.tensor > 1)
        sizes = min(sizes, (rules.graph_streams - 40 * groups) // (model.num_layers + 1) // (1 + 2 * groups))
    decode = min(most, max_num_seqs * per_seq)
    full = sum(size <= decode for size in rules.capture_sizes)
    return sizes * rules.piecewise_graphs + full * rules.full_graphs


def graph_pool(
    rules: EngineRules,
    model: ModelShape,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_speculative_tokens: int = 0,
    enforce_eager: bool = False,
    ranks: Ranks = ALONE,
) -> Estimate:
    """Memory of captured graphs, at the engine's default batch sizes; nothing where it runs without any."""
    if enforce_eager or not rules.capture_sizes:
        return exactly(0, rules.sources["no_graphs"])
    graphs = captured_graphs(
        rules,
        model,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=num_speculative_tokens,
        ranks=ranks,
    )
    figure = Span(
        *(rules.graph_base_bytes + per_layer * graphs * model.num_blocks // 2 for per_layer in rules.graph_layer_bytes)
    )
    if model.latent_dim:
        figure = Span(*(rules.graph_mla_factor * size for size in figure))
    elif model.experts is not None:
        figure = figure.plus(Span(*rules.graph_moe_bytes))
    return Estimate(*figure, rules.sources["graphs"])

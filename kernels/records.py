"""The plain records that this folder owns: shapes of a model, a device and a batch, and the cost model's contract."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from hbmtwin.kernels.step_times import StepTimes

LayerType = Literal["attention", "mamba", "mlp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """The sizes of a model's Mamba-2 layers (state spaces), in the words of its ``config.json`` without ``mamba_``.

    A layer keeps of a sequence, whatever its length, the last ``d_conv - 1`` inputs of its convolution and the state of
    its recurrence. Ranks share the heads; a single group of B and C is on every rank, as in vLLM.
    """

    n_heads: int
    d_head: int
    d_state: int
    n_groups: int = 1
    d_conv: int = 4
    chunk_size: int = 256
    """Tokens that prefill computes as one block of matrices."""
    conv_bias: bool = True
    conv_dtype_bytes: int = 2
    """Of the convolution's state: vLLM's ``mamba_cache_dtype``."""
    ssm_dtype_bytes: int = 2
    """Of the recurrence's: vLLM's ``mamba_ssm_cache_dtype``."""

    def __post_init__(self) -> None:
        sizes = (self.n_heads, self.d_head, self.d_state, self.n_groups, self.chunk_size)
        if min(*sizes, self.conv_dtype_bytes, self.ssm_dtype_bytes) < 1 or self.d_conv < 2:
            raise ValueError(f"sizes of Mamba-2 layers are at least 1, d_conv at least 2: {self}")
        if self.n_heads % self.n_groups:
            raise ValueError(f"{self.n_groups} groups do not divide {self.n_heads} heads of Mamba-2")

    @property
    def inner_size(self) -> int:
        """Width of what the convolution and the recurrence work on."""
        return self.n_heads * self.d_head

    def can_split(self, tensor_parallel_size: int) -> bool:
        """Whether heads, and groups unless there is one, divide over so many ranks."""
        tp = tensor_parallel_size
        return self.n_heads % tp == 0 and (self.n_groups == 1 or self.n_groups % tp == 0)

    def group_elements(self, tensor_parallel_size: int = 1) -> int:
        """Elements of B, and of C, of a token on one rank."""
        return max(1, self.n_groups // tensor_parallel_size) * self.d_state

    def conv_channels(self, tensor_parallel_size: int = 1) -> int:
        """Channels of the convolution on one rank: its input and B and C."""
        return self.inner_size // tensor_parallel_size + 2 * self.group_elements(tensor_parallel_size)

    def conv_state_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Of one layer and sequence on one rank."""
        return (self.d_conv - 1) * self.conv_channels(tensor_parallel_size) * self.conv_dtype_bytes

    def ssm_state_bytes(self, tensor_parallel_size: int = 1) -> int:
        """The same of the recurrence."""
        return self.inner_size // tensor_parallel_size * self.d_state * self.ssm_dtype_bytes

    def state_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Both: all that a layer keeps of a sequence on one rank."""
        return self.conv_state_bytes(tensor_parallel_size) + self.ssm_state_bytes(tensor_parallel_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallParts:
    """Vectors beside a layer's matrices: below 0.1 % of any model, and the last digit of its weights in a log."""

    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection; whole on every rank."""
    mlp_bias: bool = False
    query_key_norm: Literal["none", "head", "width"] = "none"
    """A norm of queries and one of keys: as long as a head, or as all heads of the rank."""
    norms: int = 2
    """Of a layer, each as wide as the hidden states."""
    norm_bias: bool = False
    head_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The sizes of a mixture of experts, in those layers that have one instead of a single MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of one routed expert."""
    shared_intermediate_size: int = 0
    """Of the shared experts together, which every token passes; 0: there are none."""
    shared_gate: bool = False
    """Whether a gate of its own weighs the shared expert (Qwen2-MoE)."""
    dense_layers: tuple[int, ...] = ()
    """Layers of the whole model that have an MLP of the model's ``intermediate_size`` instead."""
    router_dtype_bytes: int = 0
    """Of the router's weights; 0: as the model's."""
    correction_bias: bool = False
    """Whether the router adds an fp32 number an expert to its scores (DeepSeek-V3)."""

    def __post_init__(self) -> None:
        if min(self.num_experts, self.experts_per_token, self.intermediate_size) < 1:
            raise ValueError(f"sizes of experts are at least 1: {self}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"a token passes at most all {self.num_experts} experts, not {self.experts_per_token} of them"
            )
        if self.shared_intermediate_size < 0:
            raise ValueError(f"shared_intermediate_size is at least 0, not {self.shared_intermediate_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the matrices of layers are stored where that is not the model's dtype; activations too where
    ``activation_bits`` says so. Embedding, head, routers and vectors keep the model's dtype."""

    method: str
    """As vLLM calls it: ``fp8``, ``ascend``, ``awq``, ``gptq``, ``compressed-tensors``."""
    weight_bits: int
    weight_type: Literal["int", "float"] = "int"
    """What the stored weights are: ``float`` is FP8 or FP4."""
    activation_bits: int = 16
    group_size: int = 0
    """Input channels that share a scale; 0: one scale an output channel, -1: one a matrix."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale (DeepSeek's FP8); then ``group_size`` means nothing."""
    scale_bytes: int = 2
    zero_points: bool = False
    """Whether a zero point of ``weight_bits`` stands beside each scale (AWQ)."""
    output_channel_bytes: int = 0
    """What each output channel has besides its scale: offsets and the like."""
    input_channel_bytes: int = 0
    """What each input channel has, outside experts."""
    unquantized: tuple[str, ...] = ()
    """Names, or runs of whole parts of names between dots, of matrices that keep the model's dtype; ``*`` is any text.
    They are those of the checkpoint (``q_proj`` where vLLM has ``qkv_proj``)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes, as its Hugging Face ``config.json`` states them."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    dtype_bytes: int = 2
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    kv_lora_rank: int = 0
    """Above 0: multi-head latent attention (MLA). ``head_dim`` is then that of K, ``qk_nope + qk_rope``."""
    q_lora_rank: int = 0
    """0: the query has no down projection."""
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    """0: as ``head_dim``."""
    latent_cache: bool = True
    """MLA: the engine keeps the latent. False: it writes K and V out head by head, V padded to K's ``head_dim``."""
    layer_windows: tuple[int, ...] = ()
    """Tokens that the attention of each layer sees, its own among them; 0: all. Empty: every layer sees all."""
    rotary_dim: int | None = None
    """Elements of a head that are rotated; None: all; 0: the model has no rotary table."""
    rotary_tables: int = 1
    """Two where layers with a window are rotated at another base than those that see all."""
    rotary_dtype_bytes: int = 0
    """0: as the model's; vLLM on CUDA keeps the table of DeepSeek's YaRN in fp32."""
    mamba: Mamba2 | None = None
    layer_types: tuple[LayerType, ...] = ()
    """With ``mamba``: what each layer is. Empty: all are attention."""
    mlp_in_layer: bool = True
    """Attention or Mamba-2, and an MLP behind it, make a layer. False (Nemotron-H): a layer is one of the three."""
    split_ends: bool = True
    """In a pipeline the embedding is on the first stage, last norm and head on the last. False: all on every stage."""
    first_stage: bool = True
    """False: hidden states come from another pipeline stage (:mod:`hbmtwin.kernels.stages`)."""
    last_stage: bool = True
    """False: hidden states go to another pipeline stage, and there are no logits."""
    first_layer: int = 0
    """Of a pipeline stage: the number of its first layer in the whole model."""
    parts: SmallParts = SmallParts()
    experts: Experts | None = None
    """A mixture of experts; None: every layer has a single MLP."""
    quantization: Quantization | None = None
    """None: weights are stored in the model's dtype."""
    source: str = ""

    def __post_init__(self) -> None:
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise ValueError(f"{self.name} has {self.num_layers} layers and {len(self.layer_windows)} windows")
        if len(set(self.layer_windows) - {0}) > 1 or any(window < 0 for window in self.layer_windows):
            raise ValueError(f"{self.name}: all layers with a window have the same one, not {self.layer_windows}")
        if self.experts is not None and not self.mlp_in_layer:
            raise ValueError(f"{self.name}: experts in layers of their own are not computed")
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        if (self.mamba is None) != (not self.layer_types):
            raise ValueError(f"{self.name}: layer_types belong to a model with Mamba-2 layers, and it must have them")
        if self.mamba is None:
            return
        if len(self.layer_types) != self.num_layers:
            raise ValueError(f"{self.name} has {self.num_layers} layers and {len(self.layer_types)} layer_types")
        if not {"attention", "mamba"} <= set(self.layer_types):
            raise ValueError(f"{self.name}: layers of attention and of Mamba-2 are computed together only")
        if self.mlp_in_layer and "mlp" in self.layer_types:
            raise ValueError(f"{self.name}: an MLP is a layer of its own, or in every layer")
        if self.layer_windows or self.kv_lora_rank:
            raise ValueError(f"{self.name}: windows and latent attention (MLA) beside Mamba-2 are not computed")

    @property
    def num_expert_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return sum(self.has_experts(i) for i in range(self.num_layers))

    def has_experts(self, layer: int) -> bool:
        """Whether that layer, counted from the first of this shape, has a mixture of experts."""
        return self.experts is not None and self.first_layer + layer not in self.experts.dense_layers

    @property
    def num_attention_layers(self) -> int:
        """Layers that keep KV of every token."""
        return self.layer_types.count("attention") if self.layer_types else self.num_layers

    @property
    def num_mamba_layers(self) -> int:
        """Layers that keep a state."""
        return self.layer_types.count("mamba")

    def mamba_state_bytes(self, tensor_parallel_size: int = 1) -> int:
        """What one Mamba-2 layer keeps of a sequence on one rank; 0 without such layers."""
        return self.mamba.state_bytes(tensor_parallel_size) if self.mamba is not None else 0

    @property
    def num_blocks(self) -> int:
        """Attentions, Mamba-2 mixers and MLPs: each adds to the residual stream once, two in a usual layer."""
        return 2 * self.num_layers if self.mlp_in_layer else self.num_layers

    @property
    def window(self) -> int:
        """Tokens of the sliding window of those layers that have one; 0: none has."""
        return max(self.layer_windows, default=0)

    @property
    def num_window_layers(self) -> int:
        """Layers that see a window of the context only."""
        return sum(window > 0 for window in self.layer_windows)

    @property
    def latent_dim(self) -> int:
        """Elements of the one cached tensor that serves as K and V (latent and rotary part); 0: K and V are cached."""
        return self.kv_lora_rank + self.qk_rope_head_dim if self.kv_lora_rank and self.latent_cache else 0


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator die as software sees it, and the default coefficients of its cost model."""

    name: str
    vendor: str
    """``ascend``, ``nvidia`` or ``cpu``."""
    memory_bytes: int
    """Total that the runtime reports, below the nominal size."""
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: float
    """Dense FP16/BF16."""
    weight_bandwidth_efficiency: float
    kv_bandwidth_efficiency: float
    prefill_flops_efficiency: float
    attention_launch_ns: int
    """Per layer and attention call; a step that both prefills and decodes makes two."""
    layer_overhead_ns: int
    step_overhead_ns: int
    host_step_ns: int = 0
    """What the host needs for a decode step, whatever the device does: the step takes the longer of the two."""
    host_layer_ns: int = 0
    """The same for a step that prefills, per layer: those are not replayed as one graph."""
    allreduce_ns: dict[int, int] = field(default_factory=dict)
    """Decode-size message, by tensor-parallel size."""
    link_bandwidth_bytes_per_s: float = 0.0
    """Bus bandwidth of a large all-reduce inside one node."""
    send_ns: int = 0
    """One message between two pipeline stages of a node, however small; 0: no figure."""
    send_bandwidth_bytes_per_s: float = 0.0
    """Of such a message, when it is large: the link between two devices."""
    driver_call_ns: int = 0
    sync_ns: int = 0
    host_bandwidth_bytes_per_s: float = 0.0
    context_bytes: int = 0
    """What the context and the vendor's libraries hold before anything is loaded."""
    multiprocessor_count: int = 0
    """Where the sampler's kernel keeps a scratch row per multiprocessor; 0 where it has none."""
    default_block_size: int = 16
    family: str = ""
    """Kind of its cores, by which the capability table goes: ``a2``, ``a3``, ``310p``, ``910a``, ``ampere``, ``ada``,
    ``hopper``, ``blackwell_rtx``."""
    runtime_names: tuple[str, ...] = ()
    """What the runtime and the vendor's tools call it: ``Ascend910B2``, ``NVIDIA H100 80GB HBM3``."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each figure comes from, by field name, with its range or confidence."""
    matmul_overlap: float = 1.0
    """Share of the shorter of streaming weights and of their FLOPs that hides behind the longer: 1 on a device that
    loads while it computes, less where a core does one after the other."""
    attention_flops_efficiency: float = 0.0
    """Of attention's own products in prefill; 0: as ``prefill_flops_efficiency``."""
    attention_block_tokens: int = 0
    """Keys of a block that a causal kernel computes as one, masked ones too; 0: it computes none that is masked."""
    elementwise_bytes_per_s: float = 0.0
    """Speed at which a layer's small ops pass over the values of a token: norms, rotary, activation, sums. 0: whatever
    the tokens, they are in ``layer_overhead_ns``."""
    attention_sequence_ns: int = 0
    """Per layer and sequence of an attention call: of kernels that take the sequences one by one."""
    profile: str = ""
    """The calibration profile whose figures it has (:mod:`hbmtwin.kernels.profile`); empty: none."""

    @property
    def basis(self) -> str:
        """How far times that are worked out from it can be trusted: what is printed beside each."""
        return f"calibrated on {self.name}, profile {self.profile}" if self.profile else "default, uncalibrated"


class BatchShape(NamedTuple):
    """What the cost of one step depends on. A leap repeats it: decode reads grow by one token a sequence a step."""

    prefill: tuple[tuple[int, int], ...] = ()
    """(new tokens, context tokens before them) of each sequence that computes more than its last token."""
    decode_count: int = 0
    """Sequences that compute one token."""
    kv_read_tokens: int = 0
    """KV tokens that the decode attention reads in the first step, summed over sequences, own token included."""
    kv_read_growth: int = 0
    """By how much that rises from one step to the next (usually ``decode_count``)."""
    window_read_tokens: int = 0
    """The same in layers with a sliding window."""
    window_read_growth: int = 0

    @property
    def tokens(self) -> int:
        """Tokens computed in a step."""
        return self.decode_count + sum(new for new, _ in self.prefill)


class CostModel(Protocol):
    """Time of a step in integer nanoseconds; a leap is the exact sum of its steps."""

    basis: str
    """``default, uncalibrated`` or ``calibrated on <device>, profile <name>``: printed beside every time."""

    def steps(self, b: BatchShape) -> StepTimes:
        """Times of steps of this batch in a row; of one that prefills only the first one means anything."""
        ...

    def work_ns(self, *, driver_calls: int, syncs: int, copied_bytes: int, swapped_bytes: int) -> int:
        """Time that memory management adds to a step."""
        ...

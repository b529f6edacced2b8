"""Mixers that keep a state of constant size: Mamba, Mamba-2, gated delta nets and short convolutions."""

from __future__ import annotations

from math import gcd

from kvcalc.model.caches import RecurrentState
from kvcalc.model.mixers.attention import Flops
from kvcalc.model.tensors import Weight, linear, norm, other
from kvcalc.records import NamedTuple

# A step reads and decays each element of the state, adds to it, and sums over the result.
_FLOPS_PER_ELEMENT = 6
# A delta net also normalises queries and keys and computes two gates. A convolution alone has no state.
_LAUNCHES = {"delta": 12, "none": 2}


class Recurrence(NamedTuple):
    """A recurrence over the tokens of a sequence, or only a convolution.

    `kind` is the kind of recurrence: `linear` (Mamba-2), `delta` (a gated delta net), `selective` (Mamba), `none` (only
    a convolution), or empty for any other kind. There are `heads` states of `k_width` x `v_width`, with keys of
    `key_heads` heads. A selective state has `k_width` elements per channel.
    """

    state: RecurrentState
    kind: str = ""
    heads: int = 0
    key_heads: int = 0
    k_width: int = 0
    v_width: int = 0
    weights: tuple[Weight, ...] = ()

    @property
    def caches(self) -> tuple[RecurrentState]:
        return (self.state,)

    @property
    def launches(self) -> int:
        """The kernels of a decode step besides the matrices and norms, in units of a small kernel (about 2 us).

        They are the convolution, the gates and copies of its parts, and the update of the state, which costs two.
        Source: kernel tables (aiconfigurator, commit 095f58a): convolution 2 us, update of a delta net 4 to 17 us.
        """
        return _LAUNCHES.get(self.kind, 8)

    def flops(self, ranks: int) -> tuple[Flops, ...]:
        return ((_FLOPS_PER_ELEMENT * (self.state.state_elements // ranks), 0),)


def mamba(
    inner: int,
    state_size: int,
    kernel: int,
    hidden_size: int,
    rank: int,
    prefix: str,
    *,
    bias: bool = False,
    conv_bias: bool = True,
    has_norms: bool = False,
) -> Recurrence:
    """Mamba: a convolution over the inner width, and a state of `state_size` per channel of that width, in fp32.

    `rank` is the low rank of the time-step projection. `has_norms`: the time step and the matrices B and C are
    normalized, as in Jamba. Source: the Mamba paper, algorithm 2; MambaMixer and JambaMambaMixer, Transformers 5.23.0.
    """
    weights: tuple[Weight, ...] = (
        linear(f"{prefix}.in_proj", hidden_size, 2 * inner, bias),
        linear(f"{prefix}.x_proj", inner, rank + 2 * state_size),
        linear(f"{prefix}.dt_proj", rank, inner, bias=True),
        linear(f"{prefix}.out_proj", inner, hidden_size, bias),
        other(f"{prefix}.conv1d", inner * (kernel + conv_bias)),
        other(f"{prefix}.A_log", inner * state_size),
        other(f"{prefix}.D", inner),
    )
    if has_norms:
        widths = {"dt": rank, "b": state_size, "c": state_size}
        weights += tuple(norm(f"{prefix}.{name}_layernorm", width) for name, width in widths.items())
    return Recurrence(
        RecurrentState(inner, kernel, inner * state_size), "selective", k_width=state_size, weights=weights
    )


def mamba2(
    inner: int,
    heads: int,
    groups: int,
    state_size: int,
    kernel: int,
    hidden_size: int,
    prefix: str,
    *,
    bias: bool = False,
    conv_bias: bool = True,
    output_bias: bool | None = None,
    has_norm: bool = True,
) -> Recurrence:
    """Mamba-2: a convolution over the inner width and over both group matrices (B and C).

    The state has heads x head_dim x state_size elements. Source: Mamba2Mixer and BambaMixer, Transformers 5.23.0.
    """
    shared = 2 * groups * state_size
    channels = inner + shared
    state = RecurrentState(
        channels, kernel, inner * state_size, num_heads=heads, num_groups=groups, group_channels=shared
    )
    weights: tuple[Weight, ...] = (
        linear(f"{prefix}.in_proj", hidden_size, inner + channels + heads, bias),
        linear(f"{prefix}.out_proj", inner, hidden_size, bias if output_bias is None else output_bias),
        other(f"{prefix}.conv1d", channels * (kernel + conv_bias)),
        other(f"{prefix}.dt_bias", heads),
        other(f"{prefix}.A_log", heads),
        other(f"{prefix}.D", heads),
    )
    if has_norm:
        weights += (norm(f"{prefix}.norm", inner),)
    return Recurrence(state, "linear", heads, groups, state_size, inner // heads, weights)


def delta_net(
    value_heads: int,
    key_heads: int,
    key_width: int,
    value_width: int,
    kernel: int,
    hidden_size: int,
    inputs: dict[str, int],
) -> Recurrence:
    """A gated delta net: a convolution over queries, keys and values, and one state matrix per value head.

    The matrix is key_width x value_width, in fp32. `inputs` maps the names of the input projections to their numbers of
    outputs. Source: Qwen3NextGatedDeltaNet, Transformers 5.23.0.
    """
    values = value_heads * value_width
    channels = 2 * key_heads * key_width + values
    state = RecurrentState(
        channels, kernel, value_heads * key_width * value_width, num_heads=gcd(key_heads, value_heads)
    )
    weights = (
        *(linear(f"linear_attn.in_proj_{name}", hidden_size, outputs) for name, outputs in inputs.items()),
        linear("linear_attn.out_proj", values, hidden_size),
        other("linear_attn.conv1d", channels * kernel),
        other("linear_attn.dt_bias", value_heads),
        other("linear_attn.A_log", value_heads),
        norm("linear_attn.norm", value_width),
    )
    return Recurrence(state, "delta", value_heads, key_heads, key_width, value_width, weights)


def delta_attention(heads: int, head_dim: int, kernel: int, hidden_size: int, low_ranks: str = "fg") -> Recurrence:
    """Kimi delta attention: convolutions over queries, keys and values, and a state of head_dim x head_dim per head.

    The state is in fp32. The decay (f) and the gate of the output (g) each have two matrices of rank head_dim if they
    are in `low_ranks`, else one. Source: KimiLinearDeltaAttention and BailingHybridKDA, Transformers 5.23.0; for Kimi
    K3, KimiK3DeltaAttention, vLLM 0.33.0.
    """
    inner = heads * head_dim
    weights = (
        *(linear(f"self_attn.{name}_proj", hidden_size, inner) for name in "qkv"),
        linear("self_attn.o_proj", inner, hidden_size),
        linear("self_attn.b_proj", hidden_size, heads),
        *(linear(f"self_attn.{name}_a_proj", hidden_size, head_dim) for name in low_ranks),
        *(linear(f"self_attn.{name}_b_proj", head_dim, inner) for name in low_ranks),
        *(linear(f"self_attn.{name}_proj", hidden_size, inner) for name in "fg" if name not in low_ranks),
        other("self_attn.conv1d", 3 * inner * kernel),
        other("self_attn.dt_bias", inner),
        other("self_attn.A_log", heads),
        norm("self_attn.o_norm", head_dim),
    )
    state = RecurrentState(3 * inner, kernel, heads * head_dim * head_dim, num_heads=heads)
    return Recurrence(state, "delta", heads, heads, head_dim, head_dim, weights)


def short_convolution(hidden_size: int, kernel: int, bias: bool = False) -> Recurrence:
    """LFM2: a gated convolution over the hidden size, without a state. Source: Lfm2ShortConv, Transformers 5.23.0."""
    weights = (
        linear("conv.in_proj", hidden_size, 3 * hidden_size, bias),
        linear("conv.out_proj", hidden_size, hidden_size, bias),
        other("conv.conv", hidden_size * (kernel + bias)),
    )
    return Recurrence(RecurrentState(hidden_size, kernel, 0), "none", weights=weights)

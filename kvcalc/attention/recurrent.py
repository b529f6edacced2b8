"""Layers that keep a state of constant size instead of keys and values: a short convolution, then a recurrence.

There are three recurrences. S is a matrix per head, or a row per channel:

    linear     S = g S + k (x) v                                   Mamba-2 (Dao and Gu 2024), k and q shared by groups
    delta      S = g S + k (x) beta (v - g S^T k)                  gated delta net (Yang et al. 2024)
    selective  S = exp(dt A) S + dt B x, per channel               Mamba (Gu and Dao 2023), algorithm 2

`none` is only a gated convolution (LFM2). Several tokens at once are computed as matrix products, except in the
selective scan, which processes one token after another. Norms, gate activations and low ranks do not follow a specific
model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcalc.attention.core import repeat_heads, split_heads
from kvcalc.records import NamedTuple


class StateShape(NamedTuple):
    """The sizes of one layer. `kind` is one of the recurrences above.

    There are `heads` states of k_width x v_width, and keys and queries have `key_heads` heads. `channels` channels go
    through a convolution with `kernel` taps. A selective state is channels x k_width.
    """

    kind: str
    channels: int
    kernel: int
    heads: int = 0
    key_heads: int = 0
    k_width: int = 0
    v_width: int = 0

    @property
    def state(self) -> tuple[int, ...]:
        """The shape of one sequence's state."""
        if self.kind == "selective":
            return (self.channels, self.k_width)
        return (self.heads, self.k_width, self.v_width) if self.kind != "none" else (0,)

    @property
    def in_widths(self) -> list[int]:
        """The widths of the input projection's parts: convolution channels, output gate, decays and betas of heads."""
        return [self.channels, self.out_width, 2 * self.heads if self.kind in ("linear", "delta") else 0]

    @property
    def out_width(self) -> int:
        return self.heads * self.v_width if self.kind in ("linear", "delta") else self.channels

    def parameters(self, hidden_size: int) -> int:
        """The number of parameters in the projections, without biases, norms and the convolution."""
        inner = self.channels * (2 * self.k_width + 1) if self.kind == "selective" else 0
        return hidden_size * (sum(self.in_widths) + self.out_width) + inner


class StateCache:
    """The last inputs of the convolution, (batch, channels, kernel - 1), and the state, (batch, *state)."""

    layout = "state"

    def __init__(
        self,
        batch_size: int,
        shape: StateShape,
        conv_dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.length = 0
        conv = torch.zeros(batch_size, shape.channels, shape.kernel - 1, dtype=conv_dtype, device=device)
        state = torch.zeros(batch_size, *shape.state, dtype=state_dtype, device=device)
        self.tensors: tuple[Tensor, ...] = (conv, state)
        self.scales: tuple[Tensor, ...] = ()
        self._kept: tuple[Tensor, ...] = ()

    @property
    def held(self) -> int:
        return self.length

    def keep(self) -> None:
        """Save the current state for `rewind`, because the effect of a step cannot be reversed."""
        self._kept = tuple(tensor.clone() for tensor in self.tensors)

    def rewind(self, length: int) -> None:
        """Restore the state that `keep` saved."""
        for tensor, kept in zip(self.tensors, self._kept):
            tensor.copy_(kept)
        self._kept = ()
        self.length = length


class RecurrentMixer(nn.Module):
    """One recurrent layer with its projections. Input and output have the width hidden_size."""

    def __init__(
        self, hidden_size: int, shape: StateShape, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        made = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(hidden_size, sum(shape.in_widths), bias=False, **made)
        self.conv = nn.Parameter(torch.empty(shape.channels, shape.kernel, device=device, dtype=dtype))
        if shape.kind == "selective":
            self.x_proj = nn.Linear(shape.channels, 2 * shape.k_width + 1, bias=False, **made)
        self.o_proj = nn.Linear(shape.out_width, hidden_size, bias=False, **made)
        nn.init.constant_(self.conv, 1.0 / shape.kernel)

    def forward(self, x: Tensor, cache: StateCache) -> Tensor:
        """Run the tokens of `x` (batch, tokens, hidden_size), which follow those in `cache`. Returns the same shape."""
        shape = self.shape
        mixed, gate, rest = torch.split(self.in_proj(x), shape.in_widths, dim=-1)
        mixed = self._convolve(mixed, cache.tensors[0])
        if shape.kind == "none":
            out = mixed
        elif shape.kind == "selective":
            out = self._scan(mixed, cache.tensors[1])
        else:
            out = self._recur(F.silu(mixed), rest, cache.tensors[1])
        cache.length += x.shape[1]
        projected: Tensor = self.o_proj(out.to(x.dtype) * F.silu(gate))
        return projected

    def _convolve(self, x: Tensor, last: Tensor) -> Tensor:
        """The causal convolution, separately for each channel: (batch, tokens, channels). Updates `last`."""
        inputs = torch.cat((last.to(x.dtype), x.transpose(1, 2)), dim=2)
        last.copy_(inputs[:, :, inputs.shape[2] - last.shape[2] :])
        windows = inputs.unfold(2, self.shape.kernel, 1)
        out: Tensor = (windows * self.conv[:, None]).sum(-1).transpose(1, 2)
        return out

    def _recur(self, x: Tensor, rest: Tensor, state: Tensor) -> Tensor:
        """The linear and the delta recurrence over all tokens at once, in fp32. Updates `state`.

        Let G be the product of the decays so far. Then S = G S0 + sum_j (G / G_j) k_j (x) u_j. For `linear`, u is v.
        For `delta`, u solves a triangular system (Yang et al. 2024, "Gated Delta Networks").
        """
        shape = self.shape
        keys = shape.key_heads * shape.k_width
        # In Mamba-2 the values come first. The order does not matter here.
        query, key, value = torch.split(x.float(), [keys, keys, shape.out_width], dim=-1)
        value = split_heads(value, shape.heads)
        query, key = repeat_heads(value, *(split_heads(part, shape.key_heads) for part in (query, key)))
        decay, beta = (part.transpose(1, 2).float() for part in torch.split(rest, shape.heads, dim=-1))
        total = F.logsigmoid(decay + 4.0).cumsum(-1)
        beta = beta.sigmoid()[..., None]
        if shape.kind == "delta":
            query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        since = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        carried = total.exp()[..., None]
        update = beta * value
        if shape.kind == "delta":
            lower = (beta * (key @ key.transpose(-1, -2)) * since).tril(-1)
            update = torch.linalg.solve_triangular(
                lower, beta * (value - carried * (key @ state.float())), upper=False, unitriangular=True
            )
        out = carried * (query @ state.float()) + (query @ key.transpose(-1, -2) * since) @ update
        last = (total[..., -1:] - total).exp()[..., None]
        state.copy_(carried[..., -1:, :] * state.float() + (key * last).transpose(-1, -2) @ update)
        return out.transpose(1, 2).flatten(2)

    def _scan(self, x: Tensor, state: Tensor) -> Tensor:
        """The selective scan, one token after another, in the state's dtype. Updates `state`."""
        x = F.silu(x)
        width = self.shape.k_width
        write, read, step = torch.split(self.x_proj(x).to(state.dtype), [width, width, 1], dim=-1)
        rates = -torch.arange(1, width + 1, dtype=state.dtype, device=x.device)
        outputs = []
        for t in range(x.shape[1]):
            dt = F.softplus(step[:, t] + x[:, t].to(state.dtype))[..., None]
            state.mul_((dt * rates).exp()).add_(dt * x[:, t, :, None].to(state.dtype) * write[:, t, None])
            outputs.append((state * read[:, t, None]).sum(-1))
        return torch.stack(outputs, dim=1)

"""Rotary position embedding, applied to queries and keys before the keys are cached.

Source: Su et al. 2021 (RoFormer), in the half-split layout of GPT-NeoX and LLaMA: dimension i turns with
i + rope_dim / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Rotates the first `rope_dim` dimensions of every head by an angle that grows with the position.

    `rope_dim` must be even; dimensions beyond it pass unchanged. Frequencies are theta ** (-2i / rope_dim).
    """

    inverse_frequency: Tensor

    def __init__(self, rope_dim: int, theta: float = 10_000.0, device: torch.device | None = None) -> None:
        super().__init__()
        if rope_dim % 2:
            raise ValueError(f"rope_dim {rope_dim} is odd: dimensions turn in pairs")
        self.rope_dim, self.theta = rope_dim, theta
        self.register_buffer("inverse_frequency", torch.empty(0), persistent=False)
        self.set_frequencies(device)

    def set_frequencies(self, device: torch.device | None) -> None:
        """Put the frequencies on `device`: at first, and again where the module was built without memory."""
        # Computed on the CPU: on the meta device torch's arange loads its compiler, which takes seconds.
        exponents = torch.arange(0, self.rope_dim, 2, dtype=torch.float32, device="cpu") / self.rope_dim
        self.inverse_frequency = (self.theta**-exponents).to(device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each (tokens, rope_dim / 2) in fp32, of integer `positions` (tokens,)."""
        angle = positions.to(torch.float32)[:, None] * self.inverse_frequency[None, :]
        return angle.cos(), angle.sin()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` (..., tokens, width) with width >= rope_dim, rotated by its tokens' `positions` (tokens,); dtype kept."""
        cos, sin = (part.to(x.dtype) for part in self.angles(positions))
        half = self.rope_dim // 2
        first, second, rest = x[..., :half], x[..., half : self.rope_dim], x[..., self.rope_dim :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

"""Rotary position embedding, applied to queries and keys before the keys are cached.

Source: Su et al. 2021 (RoFormer), in the half-split layout of GPT-NeoX and LLaMA: dimension i is paired with
dimension i + rope_dim / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The last result of `RotaryEmbedding.rotation` for each kind, with what it is of. A step asks for it in every layer.
# A CUDA graph of a step reads this memory, so it must be replayed before a step at another position runs.
_LAST: dict[tuple[object, ...], tuple[tuple[object, ...], tuple[Tensor, Tensor]]] = {}


class RotaryEmbedding(nn.Module):
    """Rotates the first `rope_dim` dimensions of every head by an angle that grows with the position.

    `rope_dim` must be even. The other dimensions do not change. The frequencies are theta ** (-2i / rope_dim).
    """

    inverse_frequency: Tensor

    def __init__(self, rope_dim: int, theta: float = 10_000.0, device: torch.device | None = None) -> None:
        super().__init__()
        if rope_dim % 2:
            raise ValueError(f"rope_dim {rope_dim} is odd, but dimensions are rotated in pairs")
        self.rope_dim, self.theta = rope_dim, theta
        self.register_buffer("inverse_frequency", torch.empty(0), persistent=False)
        self.set_frequencies(device)

    def set_frequencies(self, device: torch.device | None) -> None:
        """Put the frequencies on `device`. Call this again if the module was built on the meta device."""
        # Computed on the CPU, because torch's arange on the meta device loads its compiler, which takes seconds.
        exponents = torch.arange(0, self.rope_dim, 2, dtype=torch.float32, device="cpu") / self.rope_dim
        self.inverse_frequency = (self.theta**-exponents).to(device)

    def rotation(
        self, start: int, tokens: int, dtype: torch.dtype, behind: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles at `tokens` positions from `start`: (tokens, rope_dim / 2) each, in `dtype`.

        If sequence b is `behind[b]` positions behind the others, the shape is (batch, 1, tokens, rope_dim / 2). They
        are computed in fp32. All layers of a step share them.
        """
        device = self.inverse_frequency.device
        alike = (self.rope_dim, self.theta, device, dtype, torch.is_inference_mode_enabled())
        if alike not in _LAST or _LAST[alike][0] != (start, tokens, behind):
            positions = torch.arange(start, start + tokens, device=device)
            if behind:
                positions = positions - torch.tensor(behind).to(device)[:, None, None]
            angle = positions.to(torch.float32)[..., None] * self.inverse_frequency
            _LAST[alike] = (start, tokens, behind), (angle.cos().to(dtype), angle.sin().to(dtype))
        return _LAST[alike][1]

    def forward(self, x: Tensor, start: int, behind: tuple[int, ...] = ()) -> Tensor:
        """Rotate `x` (..., tokens, width), whose first token is at position `start`. Width >= rope_dim. Same dtype.

        Sequence b of a batch is `behind[b]` positions behind `start`, if `behind` is given.
        """
        cos, sin = self.rotation(start, x.shape[-2], x.dtype, behind)
        half = self.rope_dim // 2
        first, second, rest = x[..., :half], x[..., half : self.rope_dim], x[..., self.rope_dim :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

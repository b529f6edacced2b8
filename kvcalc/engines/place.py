"""Where an engine runs. Some default types of a cache depend on the release and the kind of device."""

from __future__ import annotations

from kvcalc.memory.dtypes import Dtype
from kvcalc.records import NamedTuple
from kvcalc.releases import Release

# The engines' name for a row of sparse attention's latent in fp8 without scales. kvcalc's `fp8` is the packed row of
# FlashMLA, which has scales and a rotary key of 16 bits.
RAW_FP8 = Dtype("fp8_e4m3", 8)

# CUDA's compute capability of a class of devices, times ten (developer.nvidia.com/cuda/gpus). Ampere and Blackwell have
# newer ones too (8.6, 10.3, 12.1), which no engine's check distinguishes.
CAPABILITIES = {
    "pascal": 61, "volta": 70, "turing": 75, "ampere": 80, "ada": 89, "hopper": 90, "blackwell": 100,
    "blackwell-thor": 110, "blackwell-rtx": 120,
}  # fmt: skip


class Place(NamedTuple):
    """An engine's release (None: the newest) and the device's class (None: there is no device, or it is not known)."""

    release: Release | None = None
    device_class: str | None = None

    def since(self, *numbers: int) -> bool:
        """Whether the release is this one or newer."""
        return self.release is None or self.release >= Release.of(*numbers)

    @property
    def is_sm100(self) -> bool:
        """Whether CUDA's compute capability is 10.x: B200, B300 and their Grace variants."""
        return self.device_class == "blackwell"

    @property
    def is_sm120(self) -> bool:
        """Whether CUDA's compute capability is 12.x: GeForce and RTX PRO Blackwell, GB10."""
        return self.device_class == "blackwell-rtx"


ANYWHERE = Place()

DISTINGUISHED = (("blackwell", "B200 and B300"), ("blackwell-rtx", "RTX Blackwell and GB10"), ("hopper", "others"))
"""A device class of each kind that `Place` tells apart, and the devices of the kind. The last is any other class."""


def is_fp8(name: object) -> bool:
    """Whether a type that was asked for is fp8 with 4 bits of exponent, under any of its names."""
    return isinstance(name, str) and name.casefold() in ("fp8", RAW_FP8.name, "float8_e4m3fn")

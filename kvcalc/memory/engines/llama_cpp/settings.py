"""llama.cpp's own options, as llama-server spells them, and the library's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvcalc.errors import UsageError
from kvcalc.units import parse_count


class Settings(NamedTuple):
    """`parallel` is the number of slots where it is more than the batch. Without flash attention V is transposed."""

    parallel: int = 1
    kv_unified: bool = False
    ubatch_size: int = 512
    swa_full: bool = False
    flash_attn: str = "auto"

    @property
    def transposes_v(self) -> bool:
        """`auto` lays the cache out as `on` (llama_context, llama-context.cpp)."""
        return self.flash_attn == "off"

    def describe(self) -> dict[str, object]:
        """The settings used, by the names of their options; `parallel` stands in the document as n_seq_max."""
        return {
            "kv_unified": self.kv_unified, "ubatch_size": self.ubatch_size, "swa_full": self.swa_full,
            "flash_attn": self.flash_attn,
        }  # fmt: skip


def parse_settings(given: Mapping[str, str]) -> Settings:
    """The options given, each checked. Raises UsageError (exit 2)."""
    plain = Settings()
    flash_attn = given.get("flash-attn", plain.flash_attn)
    if flash_attn not in ("on", "off", "auto"):
        raise UsageError(f"--flash-attn {flash_attn!r}: not a choice", "one of on, off, auto")
    return Settings(
        parse_count(given["parallel"], "--parallel") if "parallel" in given else plain.parallel,
        "kv-unified" in given,
        parse_count(given["ubatch-size"], "--ubatch-size") if "ubatch-size" in given else plain.ubatch_size,
        "swa-full" in given,
        flash_attn,
    )

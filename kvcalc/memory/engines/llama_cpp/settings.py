"""llama.cpp's own options, as llama-server spells them, and the library's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory.engines.options import Given

VERSION = "llama-cpp-python 0.3.36"

# Pull requests of ggml-org/llama.cpp that changed what is kept, oldest first: MLA's latent instead of its heads (April
# 2025), windows instead of all tokens (May 2025), no padding by 32 any more (October 2025; by 256 since 17046), and no
# second copy of the latent as V (January 2026).
LATENT, WINDOWS, PADDING, NO_V = 12801, 13194, 16812, 19067
_PULLS = (LATENT, WINDOWS, PADDING, NO_V)


class Settings(NamedTuple):
    """`parallel` is the number of slots where it is more than the batch. Without flash attention V is transposed.

    `before_pull`: counted as a build from before that pull request, so from before the later ones too.
    """

    parallel: int
    kv_unified: bool
    ubatch_size: int
    swa_full: bool
    flash_attn: str
    before_pull: int | None

    def is_before(self, pull: int) -> bool:
        """Whether the build lacks this pull request."""
        return self.before_pull is not None and _PULLS.index(self.before_pull) <= _PULLS.index(pull)

    @property
    def padding(self) -> int:
        """Cells are rounded up by 256; once by 32 without flash attention, which was off by default
        (llama_kv_cache_get_padding, pull request 7257)."""
        return 32 if self.is_before(PADDING) and self.flash_attn != "on" else 256

    @property
    def has_one_stream(self) -> bool:
        """Streams of their own came after windows did (pull request 14363, July 2025)."""
        return self.kv_unified or self.is_before(WINDOWS)

    @property
    def transposes_v(self) -> bool:
        """`auto` lays the cache out as `on` (llama_context, llama-context.cpp)."""
        return self.flash_attn == "off"

    def describe(self) -> dict[str, object]:
        """The settings used, by the names of their options; `parallel` stands in the document as n_seq_max."""
        return {
            "kv_unified": self.has_one_stream, "ubatch_size": self.ubatch_size, "swa_full": self.swa_full,
            "flash_attn": self.flash_attn, "before_pull": self.before_pull,
        }  # fmt: skip


def parse_settings(settings: Mapping[str, str]) -> Settings:
    """The options given, each checked. Raises UsageError (exit 2)."""
    given = Given("llama.cpp", settings)
    flash_attn, before = given.choice("flash-attn"), given.optional_count("before-pull")
    if before is not None and before not in _PULLS:
        known = ", ".join(map(str, _PULLS))
        raise UsageError(f"--before-pull {before}: kvcalc knows no change of the cache by it", f"one of {known}")
    return Settings(
        given.count("parallel", 1),
        "kv-unified" in settings,
        given.count("ubatch-size"),
        "swa-full" in settings,
        flash_attn,
        before,
    )

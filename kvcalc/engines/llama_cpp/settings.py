"""llama.cpp's own options, with llama-server's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.options import SettingsReader
from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple
from kvcalc.releases import Release

# Pull requests of ggml-org/llama.cpp that changed the contents of the cache, oldest first: the latent of MLA instead of
# its heads (April 2025), windows instead of all tokens (May 2025), the end of padding to 32 (October 2025; to 256 since
# 17046), four slots by default (November 2025), and no second copy of the latent as V (January 2026). The last one
# changed no cache: it ended --split-mode row of the CUDA backend (June 2026).
LATENT, WINDOWS, PADDING, SLOTS, NO_V, NO_ROWS = 12801, 13194, 16812, 16736, 19067, 24216
_PULLS = (LATENT, WINDOWS, PADDING, SLOTS, NO_V, NO_ROWS)

# llama-server without --parallel: n_parallel = 4 and kv_unified = true (tools/server/server.cpp).
AUTO_SLOTS = 4
# The newest build that is known to start one slot, of 2 November 2025. b7079 starts four (ggml-org/llama.cpp#17300).
_LAST_WITH_ONE_SLOT = Release.of(6918)
# The newest build that is known to reserve the logits of every token, of 28 May 2026. Since pull request 23861, of the
# next days, the server reserves what it reads: one row for each slot and drafted token.
LAST_WITH_ALL_LOGITS = Release.of(9357)


class Settings(NamedTuple):
    """`parallel` is the number of slots if it is more than the batch. None is llama-server's own choice.

    Without flash attention, V is transposed. `starts_four_slots` is whether llama-server chooses four slots.

    `draft_max` is the number of drafted tokens per step. To take back the tokens that the model rejects, every slot
    keeps its state before each of them (`rs_seq` in the log: 1 + 2 states of 149.62 MiB for Qwen3.8-27B with two).
    `reserves_all_logits`: the compute buffer has room for the logits of every token of a step, and the mask is made in
    fp32. `before_pull` means a build from before that pull request, and so from before the later ones too.
    """

    parallel: int | None
    kv_unified: bool
    ubatch_size: int
    swa_full: bool
    flash_attn: str
    before_pull: int | None
    draft_max: int
    starts_four_slots: bool
    reserves_all_logits: bool

    def is_before(self, pull: int) -> bool:
        """Whether the build lacks this pull request."""
        return self.before_pull is not None and _PULLS.index(self.before_pull) <= _PULLS.index(pull)

    @property
    def padding(self) -> int:
        """Cells are rounded up to a multiple of this: 256.

        Older builds use 32 without flash attention, which was off by default (llama_kv_cache_get_padding, pull request
        7257).
        """
        return 32 if self.is_before(PADDING) and self.flash_attn != "on" else 256

    def slots(self, batch: int) -> int:
        """The slots of a server for a batch. Without --parallel, a batch of more than four has as many slots."""
        chosen = self.parallel or (AUTO_SLOTS if self._chooses_slots else 1)
        return max(chosen, batch)

    def has_one_stream(self, batch: int) -> bool:
        """Whether all slots share one stream, and so the whole context.

        Separate streams came after windows (pull request 14363, July 2025). The four slots that llama-server chooses
        share one, also with --no-kv-unified.
        """
        return self.kv_unified or self.is_before(WINDOWS) or (self._chooses_slots and batch <= AUTO_SLOTS)

    @property
    def _chooses_slots(self) -> bool:
        return self.parallel is None and self.starts_four_slots

    @property
    def transposes_v(self) -> bool:
        """Whether V is transposed. `auto` has the same cache layout as `on` (llama_context, llama-context.cpp)."""
        return self.flash_attn == "off"

    def describe(self) -> dict[str, object]:
        """The settings in use, by option name. `parallel` is n_seq_max in the document, and depends on the batch."""
        return {
            "program": "llama-server", "kv_unified": self.has_one_stream(1), "ubatch_size": self.ubatch_size,
            "swa_full": self.swa_full, "flash_attn": self.flash_attn, "before_pull": self.before_pull,
            "draft_max": self.draft_max,
        }  # fmt: skip


def parse_settings(settings: Mapping[str, str], build: Release | None = None) -> Settings:
    """Parse and check the given options of a build (None: the newest). Raises UsageError (exit 2)."""
    given = SettingsReader("llama.cpp", settings)
    parsed = given.fill(
        Settings, draft_max=given.count("draft-max", 0), starts_four_slots=True, reserves_all_logits=False
    )
    if parsed.before_pull is not None and parsed.before_pull not in _PULLS:
        known = ", ".join(map(str, _PULLS))
        raise UsageError(
            f"--before-pull {parsed.before_pull}: no known change of memory in this pull", f"one of {known}"
        )
    for name in ("fit-target", "fit-ctx"):  # used with --context auto only, but checked always
        given.optional_count(name)
    has_one_slot = parsed.is_before(SLOTS) or (build is not None and build <= _LAST_WITH_ONE_SLOT)
    is_old = parsed.before_pull is not None or (build is not None and build <= LAST_WITH_ALL_LOGITS)
    return parsed._replace(starts_four_slots=not has_one_slot, reserves_all_logits=is_old)

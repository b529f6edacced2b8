"""llama.cpp: a cache of cells per context, with separate types for K and V, and recurrent states in fp32.

Source: llama-context.cpp, llama-kv-cache.cpp, llama-kv-cache-iswa.cpp and llama-memory-recurrent.cpp in
llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.engines.account import AutoContext, DividedRows, Line, PoolFigures
from kvcalc.engines.declarations import types_of
from kvcalc.engines.engine import Engine, Resolved
from kvcalc.engines.llama_cpp.account import Cells, account, cells_for, read_row
from kvcalc.engines.llama_cpp.architectures import layers_of
from kvcalc.engines.llama_cpp.placement import (
    OPTIONS,
    ROW,
    SPLIT,
    layers_per_device,
    parse_mode,
    parse_placement,
    parse_shares,
    split_layers,
)
from kvcalc.engines.llama_cpp.settings import AUTO_SLOTS, NO_ROWS, NO_V, PADDING, parse_settings
from kvcalc.engines.options import SettingsReader
from kvcalc.engines.place import ANYWHERE, Place
from kvcalc.engines.placement import count_placed_layers, without_tables
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import Dtype, gguf_type, pair, parse_dtype
from kvcalc.memory.sharding import bounds_of, stage_weights, stages_of
from kvcalc.model.caches import Cache
from kvcalc.model.spec import ModelSpec, has_cross_attention, has_states, latent_of, weights_of
from kvcalc.notes import Note
from kvcalc.releases import Release, parse_release
from kvcalc.units import format_size

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu

_MIB = 2**20
# The last known build without --fit, of November 2025, and the multiple to which --fit rounds a context down.
_LAST_WITHOUT_FIT, _CONTEXT_STEP = Release.of(7079), 256
# The last known build, of July 2026, in which slots with contexts of their own divide the model's length. Since pull
# request 27496 of August 2026, --fit gives it to each of them.
_LAST_WITH_DIVIDED_LENGTH = Release.of(9927)
# kv_cache_types, common/arg.cpp.
_TYPES = ("fp32", "fp16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


class LlamaCpp(Engine):
    """Counts the context of llama-server, which has room for a batch of sequences as long as --context.

    Without --parallel, the server has four slots that share one stream of cells; a larger batch is counted as with
    --parallel BATCH. With --parallel, each slot has its own stream, or all share one with --kv-unified. Raises
    ModelError (exit 3) for models that llama.cpp does not run or whose layout is not modelled, and UsageError (exit 2)
    for settings that llama.cpp refuses.
    """

    name = "llama.cpp"
    split_layers = staticmethod(split_layers)
    placement_options = OPTIONS
    shares_cells = True
    """Whether the slots of a unified context share its cells."""

    def __init__(self, spec: ModelSpec, settings: Mapping[str, str], stages: int, release: str | None) -> None:
        super().__init__(spec, settings, stages, release)
        build = None if release is None else parse_release("llama.cpp", release).release
        self.chosen = parse_settings(settings, build)
        self.settings = self.chosen.describe()
        if spec.model_type not in types_of(self.name, "rolls_back"):
            self.chosen = self.chosen._replace(draft_max=0)
        self.micro_batch_tokens = self.chosen.ubatch_size
        self.placement = parse_placement(settings)
        if self.placement is not None and stages > 1:
            if not self.placement.is_on_device(count_placed_layers(spec)):
                raise UsageError(
                    f"{stages} devices: parts of the model in host memory are modelled for one device only",
                    "use one device, or --split-mode none",
                )
            self.placement = None  # -ngl 99
        if self.placement is not None and has_cross_attention(spec):
            raise ModelError(f"{spec.name}: parts in host memory are not modelled for encoder-decoder models")
        mode = parse_mode(settings)
        if stages > 1:
            self._shares = parse_shares(settings[SPLIT]) if SPLIT in settings else ()
            self.bounds = bounds_of(layers_per_device(count_placed_layers(spec), self._shares or (1,) * stages))
            self.settings |= {"split_mode": mode, "tensor_split": settings.get(SPLIT)}
        self.check_model()
        if self._views_v(spec) and not spec.expands_latent:
            text = "llama.cpp before January 2026 keeps a second copy of the latent as V; --before-pull 19067 counts it"
            self.notes = (Note("engine", "latent-twice", text),)
        self.notes += (*self._note_slots(), *self._note_prompts())

    @classmethod
    def check_encoder(cls, spec: ModelSpec, settings: Mapping[str, str]) -> None:
        if parse_placement(settings) is not None:
            raise ModelError(f"{spec.name}: parts in host memory are not modelled for encoders")

    @classmethod
    def check_auto_context(cls, settings: Mapping[str, Any], release: Release | None) -> None:
        """llama-server chooses the context with --fit, which is on since December 2025 (pull request 16653)."""
        is_old = release is not None and release <= _LAST_WITHOUT_FIT
        if is_old or str(settings.get("before-pull", NO_V)) not in (str(NO_ROWS), str(NO_V)):
            raise UsageError(
                "--context auto: llama.cpp before December 2025 does not choose a context", "give --context N"
            )

    @classmethod
    def auto_context(
        cls, settings: Mapping[str, str], longest: int, batch: int, shares_context: bool, release: Release | None
    ) -> AutoContext:
        """Without --ctx-size, the server starts from the model's own length.

        It lowers it until every device keeps --fit-target free, but not below --fit-ctx. If that is not enough, it
        moves layers into host memory (common_params_fit_impl, common/fit.cpp, llama-cpp-python 0.3.36). It interpolates
        between two lengths; kvcalc takes the longest one that fits. Slots that share the context share the model's
        length too. Slots with contexts of their own each have the model's length; in older builds they divide it.
        """
        given = SettingsReader(cls.name, settings)
        margin = given.count("fit-target") * _MIB
        divided = batch
        if not shares_context:
            is_old = release is not None and release <= _LAST_WITH_DIVIDED_LENGTH
            divided = max(batch, given.optional_count("parallel") or 1) if is_old else 1
        longest //= divided
        return AutoContext(
            longest, batch, margin,
            f"leaves {format_size(margin)} free (--fit-target)", _CONTEXT_STEP,
            min(given.count("fit-ctx"), longest), "the least that llama-server chooses (--fit-ctx)",
        )  # fmt: skip

    @classmethod
    def limit_running(
        cls, settings: Mapping[str, str], context_tokens: int, tokens: int, release: Release | None
    ) -> Mapping[str, str]:
        """The slots that share one context are no more than its cells have room for.

        A server whose cells are full ends all running requests (update_slots, tools/server/server-context.cpp).
        """
        chosen = parse_settings(settings, release)
        if not chosen.has_one_stream(1):
            return settings
        room = max(1, context_tokens // tokens) if cls.shares_cells else chosen.slots(1)
        slots = min(chosen.slots(1), room)
        return {**settings, "parallel": str(slots), "kv-unified": "true"}

    def _note_slots(self) -> tuple[Note, ...]:
        """The default that a user may not expect: every slot takes memory, also an idle one."""
        kept = self.kept_by_slots()
        if not kept or self.chosen.parallel is not None or not self.chosen.starts_four_slots:
            return ()
        text = f"llama-server starts {AUTO_SLOTS} slots, and each keeps {kept} of its own; --parallel 1 starts one"
        return (Note("engine", "slots", text),)

    def _note_prompts(self) -> tuple[Note, ...]:
        """What the server keeps in host memory beside the model (--cache-ram, pull request 16391, October 2025)."""
        if self.placement is None or self.placement.host_memory_bytes is None or self.chosen.is_before(PADDING):
            return ()
        text = (
            "llama-server also keeps up to 8 GiB of prompts in host memory, which is not counted; --cache-ram 0: none"
        )
        return (Note("engine", "cache-ram", text),)

    def kept_by_slots(self) -> str:
        """What every slot keeps even if all of them share the cells. Empty if that is nothing."""
        has_window = self.window(self.spec) is not None and not self.chosen.swa_full
        kept = ("a window" if has_window else "", "a state" if has_states(self.spec) else "")
        return " and ".join(filter(None, kept))

    @staticmethod
    def cut(num_layers: int, stages: int) -> list[int]:
        """Split the layers over devices with the same memory (`splitting`)."""
        return layers_per_device(num_layers, (1,) * stages)

    def divide_rows(self, spec: ModelSpec, gpu: Gpu, num_devices: int) -> DividedRows | str | None:
        if self.settings.get("split_mode") != ROW:
            return None
        from kvcalc.engines.llama_cpp.row_split import divide_rows, tile_rows, why_not_divided

        reason, weights = why_not_divided(spec, gpu, self.chosen), weights_of(spec)
        if reason is not None or weights is None:
            return reason
        last = len(self.bounds) - 1
        parts = [without_tables(part, i == last) for i, part in enumerate(stage_weights(weights, self.bounds))]
        return divide_rows(parts, self._shares or (1,) * num_devices, tile_rows(gpu.device_class))

    @staticmethod
    def kv_dtype(
        spec: ModelSpec, dtype_name: str, settings: Mapping[str, str], dtype: str | None, place: Place = ANYWHERE
    ) -> Resolved:
        """The types of K and V: --cache-type-k and --cache-type-v, else --kv-dtype for both, else f16."""
        plain = "fp16" if dtype_name.casefold() == "auto" else dtype_name
        k, v = (parse_dtype(settings.get(f"cache-type-{name}", plain), f"--cache-type-{name}") for name in ("k", "v"))
        unknown = next((used.name for used in (k, v) if used.name not in _TYPES), None)
        if unknown:
            raise UsageError(f"--kv-dtype {unknown}: not a cache type of llama.cpp", f"one of {', '.join(_TYPES)}")
        default = dtype_name.casefold() == "auto" and not {"cache-type-k", "cache-type-v"} <= set(settings)
        return pair(k, v), "f16 is llama.cpp's default for every model" if default else None

    @staticmethod
    def weight_dtype(spec: ModelSpec, dtype_name: str | None) -> tuple[str | None, Note | None]:
        """A type that GGUF files have means such a file (`GGUF_TYPES`).

        A model published in mxfp4 (gpt-oss) means MXFP4_MOE, with Q8_0 outside the experts, as in ggml-org's files
        (ggml-org/gpt-oss-20b-GGUF). That file type is for models with experts.
        """
        if spec.gguf is not None:
            return dtype_name, None
        stated = spec.quantization
        method = stated.get("quant_method") if dtype_name is None and isinstance(stated, Mapping) else None
        name = dtype_name or ("mxfp4" if method == "mxfp4" else "")
        if name.casefold() == "mxfp4":
            from kvcalc.memory.quantization.gguf_types import count_experts

            if not count_experts(spec):
                return dtype_name, None
        return gguf_type(name) or dtype_name, None

    def check_model(self) -> None:
        """Raise ModelError (exit 3) for a model that llama.cpp does not run, or whose layout is not modelled."""
        layers_of(self.spec, self.chosen)

    def window(self, share: ModelSpec) -> int | None:
        """The window that llama.cpp keeps, or None. There is at most one."""
        return layers_of(share, self.chosen).window

    def cells(self, share: ModelSpec, tokens: int, batch: int) -> Cells:
        return cells_for(self.chosen, tokens, batch, self.window(share), shares_cells=self.shares_cells)

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        alone = layers_of(self.spec, self.chosen).only(cache)
        return sum(line.bytes for line in account(alone, self.cells(self.spec, tokens, 1), dtype, self.chosen))

    def entry_sizes(self, cache: Cache, dtype: Dtype) -> tuple[int, ...]:
        return read_row(layers_of(self.spec, self.chosen).only(cache), dtype)

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return sum(line.bytes for line in self.pool(share, dtype, tokens, batch))

    def host_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        return 0 if self.placement is None else self.held_bytes(self.divide_cache(share)[0], dtype, tokens, batch)

    def divide_cache(self, share: ModelSpec) -> tuple[ModelSpec, ModelSpec]:
        if self.placement is None:
            return share, share
        last = self.spec.num_layers - 1
        first = min(self.placement.first_on_device(count_placed_layers(self.spec)), last + 1)
        first = first if self.placement.kv_offload else last + 1
        host, device = stages_of(share, ((0, first - 1), (first, last)))
        return host, device

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        return self.chosen.padding

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        made = self.cells(share, tokens, batch)
        return PoolFigures(None, {
            "kv_unified": self.chosen.has_one_stream(batch),
            "n_ctx": made.n_ctx, "n_ctx_seq": made.cells, "n_seq_max": made.slots, "n_stream": made.streams,
            "window_cells": made.window_cells if self.window(share) else None,
        })  # fmt: skip

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line]:
        self.check_types(share, dtype)
        if share.whole is not None and not any(group.caches for group in share.layers):
            return []  # none of the layers here has a cache
        return account(layers_of(share, self.chosen), self.cells(share, tokens, batch), dtype, self.chosen)

    def check_types(self, share: ModelSpec, dtype: Dtype) -> None:
        """Raise UsageError for types that llama_init_from_model refuses."""
        v = dtype.v or dtype
        if v.block_elements > 1 and self.chosen.transposes_v:
            raise UsageError(f"--cache-type-v {v.name}: llama.cpp needs --flash-attn on to quantize V")
        if dtype.v and self._views_v(share):
            raise UsageError("--cache-type-v: K and V have the same type in llama.cpp if V is a view of K (MLA)")

    def _views_v(self, share: ModelSpec) -> bool:
        return latent_of(share) is not None and not self.chosen.is_before(NO_V)

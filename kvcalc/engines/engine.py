"""The interface of an engine: how it counts a cache, as an abstract class (`account` has the parts).

The main method is `Engine.cache_bytes`: the bytes one sequence takes in one layer's cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcalc.engines.account import (
    AutoContext,
    BatchLine,
    DeviceDefault,
    DividedRows,
    Line,
    PoolFigures,
    PoolLimit,
    RunningPool,
)
from kvcalc.engines.declarations import ENGINES, FACTS, has_table
from kvcalc.engines.options import SettingsReader, name_of
from kvcalc.engines.place import ANYWHERE, Place
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import Growth, checked_caches, entry_sizes, growth, longest_context, sequence_bytes
from kvcalc.memory.reads import Entries, Reads, reads_of
from kvcalc.memory.sharding import Bounds, bounds_of, longer_before_last, stages_of
from kvcalc.model.caches import Cache
from kvcalc.model.layout import Layout, LayoutAsked
from kvcalc.model.memo import remembered_of_two
from kvcalc.model.spec import ModelSpec, period
from kvcalc.notes import Note
from kvcalc.releases import Release, RequestedRelease, dates_of, parse_release

if TYPE_CHECKING:
    from kvcalc.engines.placement import Placement, PlacementOptions
    from kvcalc.engines.prefixes import Prefixes
    from kvcalc.engines.reserve import Reserve, ReserveInputs
    from kvcalc.engines.reuse import Reuse
    from kvcalc.engines.scheduler import Disaggregation, Schedule
    from kvcalc.engines.starts import Start
    from kvcalc.throughput.hardware import Devices, Gpu

Resolved = tuple[str | Dtype, str | None]
"""A cache's dtype as an engine resolves it, and the reason. The reason is None if the dtype is the requested one."""


class Engine(ABC):
    """How an engine counts the bytes of a model's share.

    A share is all layers on one tensor-parallel rank, or the layers of one pipeline stage. `version` is the requested
    release, or the one from which the rules were read; of the class, always the latter. `settings` are the settings in
    use, by name. `splits_heads` is whether tensor parallelism is modelled for the engine, and `splits_layers` whether
    pipeline stages are. `older_rules` ends a note about releases: how to count an older release. `running_option` is
    the engine's option for the most requests that run at once, which counts those of all DP ranks together if
    `counts_all_ranks`, and `context_option` its flag for the longest request. Without that flag it takes the model's
    own length, or with `chooses_context` the longest context that fits. It refuses a context beyond the model's unless
    the variable `limit_variable` is 1; an engine without such a variable takes any.
    `fp32_as` is the type in which it computes a model that is published in fp32, unless the question names a type.
    `starts_short` is whether it starts if the cache does not hold one request of that length.

    `has_dp_ranks` is whether the engine can copy the attention and split the experts. If it can:
    `splits_dp_ranks` is whether a DP rank may be split over several devices,
    `splits_uneven_experts` is whether the number of experts may be no multiple of the expert-parallel ranks,
    `spreads_mlps` whether MLPs without experts and the output head are split over the ranks of all replicas, and
    `spreads_head` whether the output head is, whatever the MLPs.

    `is_formula` is whether this is no engine, but the formulas alone. `classes_of_transformers` is "config" if it reads
    configs through Transformers' classes (`ModelSpec.with_its_classes`). `by_type` has the module (in this
    folder) and the class for types of models with rules of their own. `loads_towers` is whether it loads the vision and
    audio towers of a checkpoint, `pads_weights` whether the sizes to which its kernels pad weights are known, and
    `lora_option` is its option for the number of LoRA adapters on a device, and `adapter_kernels` what their kernels
    cost (`throughput.adapters.AdapterKernels`; None: not known). `fused_experts` are types of
    experts and kinds of devices for which its kernels take fewer launches, the first release, and how many fewer.
    `eager_launch_seconds` is the host's time to launch a small kernel if nothing is compiled (`eager_launches`).
    `smaller_types` are the usual types of weights, best first, with the least bits that a weight takes.
    `largest_share` is its option for the share of a device's memory, with the largest share in published recipes.
    `limits_concurrency` is whether the concurrency that it prints is at most the requests that run.
    `keeps_tables_on_host` is whether the input embedding is always in host memory, and `has_device_budgets` whether
    every device has layers and a budget of its own, unlike pipeline stages of which the largest one decides.
    `refused_vendors` are those on whose devices it has other rules, which are not modelled, or does not run.
    `has_server` is whether it is a server, which has a context of its own, and `allocates_slots` whether that allocates
    the cache of all requests that may run at its start.
    `device_classes` are the kinds of devices on which it runs; None means that any may.
    """

    name: str
    title: str  # as its project spells it
    version: str | None = None
    unread: Set[str] = frozenset()  # the model types whose layout in the engine is not known from its source
    pools_for_encoders = ""  # the releases that reserve a pool even for an encoder, in words
    splits_heads = True
    splits_layers = True
    has_dp_ranks = False
    splits_dp_ranks = True
    splits_uneven_experts = True
    spreads_mlps = False
    spreads_head = False
    older_rules = ""
    running_option: str | None = None
    counts_all_ranks = False
    block_option: str | None = None
    context_option: str | None = None
    has_server = True
    allocates_slots = False
    chooses_context = False
    limit_variable = ""
    fp32_as = "fp32"
    starts_short = True
    _default_running: int | None = None  # without that option; None if the device decides it, or if there is no limit
    notes: tuple[Note, ...] = ()
    token_ranks = 1  # the tensor-parallel ranks that divide the tokens of a cache among them (context parallelism)
    prompt_ranks = 1  # the copies of the attention and the cache that divide a prompt (prefill context parallelism)
    prompt_ranks_option: str | None = None  # the option for their number
    joins_drafts = False  # whether any drafter's layers are in the model's own cache
    drafts_for_one = False  # whether it drafts tokens for one sequence at a time
    copies_prefixes = False  # whether requests copy a prefix that they have in common, and share no memory
    has_scheduler = False
    has_instances = False  # whether it has separate prefill and decode instances (`DISAGGREGATION` of `scheduler`)
    role: str | None = None  # `role_in` its settings
    prefixes_off = ""  # how to turn the prefix cache on, if the settings leave it off
    divides_decode = True  # whether these copies also divide the requests of a decode step
    by_type: Mapping[str, tuple[str, str]] = {}
    reuse_class = ("reuse", "Reuse")  # the module (in this folder) and the class; this one has no tiers, and no drafts
    is_formula = False
    classes_of_transformers: str | None = None
    loads_towers = True
    pads_weights = False
    lora_option: str | None = None
    adapter_kernels: tuple[int, float, float] | None = None
    fused_experts: tuple[tuple[str, str, str, int], ...] = ()
    eager_launch_seconds = 0.0
    largest_share: tuple[str, str] | None = None
    smaller_types: tuple[tuple[str, float], ...] = (("fp8", 8.0), ("int4", 4.0))
    reserves_running = False  # whether it keeps memory for every request that may run, whatever runs
    limits_concurrency = True
    keeps_tables_on_host = False
    has_device_budgets = False
    refused_vendors: tuple[str, ...] = ()
    device_classes: tuple[str, ...] | None = None
    placement_options: PlacementOptions | None = None  # None: no part of a model can be in host memory
    placement: Placement | None = None  # which parts of the model are there
    micro_batch_tokens = 0  # the most tokens that the host and the device pass to each other at once

    def __init_subclass__(cls) -> None:
        """Take the facts of `engine.yaml`, for the class with the engine's name. ValueError for an unknown one."""
        for fact, value in FACTS.get(cls.__dict__.get("name", ""), {}).items():
            if fact not in Engine.__dict__ and fact not in Engine.__annotations__:
                raise ValueError(f"{cls.name}: an engine has no fact {fact}")
            setattr(cls, fact, value)

    def __init__(self, spec: ModelSpec, settings: Mapping[str, str], stages: int, release: str | None) -> None:
        self.spec = spec
        self.settings: dict[str, object] = {}
        backend, option = "attention-backend", self.running_option
        self.attention_backend = name_of(settings, backend) if backend in settings else None
        self._most_asked = None if option is None else SettingsReader(self.name, settings).optional_count(option)
        self.prompt_ranks = self.prompt_ranks_in(settings)
        self.role = self.role_in(settings)
        self.bounds: Bounds = bounds_of(self.cut(spec.num_layers, stages)) if stages > 1 else ()

    @classmethod
    def at(cls, model_type: str, release: Release | None) -> type[Engine]:
        """The class for a model type (empty: any) and a release (None: the newest)."""
        engine = imported(*cls.by_type[model_type]) if model_type in cls.by_type else cls
        return cls if engine is cls else engine.at(model_type, release)

    @staticmethod
    def cut(num_layers: int, stages: int) -> list[int]:
        """The number of layers in each of `stages` pipeline stages."""
        return longer_before_last(num_layers, stages)

    def stage_bounds(self, num_layers: int, stages: int) -> Bounds:
        """The first and last layer of each pipeline stage, if the settings may change how a model is cut."""
        return bounds_of(self.cut(num_layers, stages))

    @staticmethod
    def kv_dtype(
        spec: ModelSpec, dtype_name: str, settings: Mapping[str, str], dtype: str | None, place: Place = ANYWHERE
    ) -> Resolved:
        """The cache's dtype as the engine resolves `dtype_name`, and the reason.

        `dtype` is the requested weight dtype. `place` has the release and the device, which decide it for some models.
        """
        return dtype_name, None

    @staticmethod
    def weight_dtype(spec: ModelSpec, dtype_name: str | None) -> tuple[str | None, Note | None]:
        """The type of the weights in the engine if `dtype_name` was requested (None: the config's own), and a note."""
        return dtype_name, None

    @classmethod  # noqa: B027 - most engines have no such settings
    def check_encoder(cls, spec: ModelSpec, settings: Mapping[str, str]) -> None:
        """Raise ModelError (exit 3) if the settings are not modelled for encoders."""

    @classmethod
    def needed_context(cls, prompt_tokens: int, answer_tokens: int) -> int:
        """The context with which a server accepts a request of these lengths and does not cut its answer."""
        return prompt_tokens + answer_tokens

    @classmethod
    def prompt_settings(
        cls, settings: Mapping[str, str], prompt_tokens: int, is_complete: bool = False
    ) -> Mapping[str, str]:
        """`settings`, and what else a server must be given to accept prompts of `prompt_tokens` tokens.

        With `is_complete`, nothing else is given, as in a command. Raises LayoutError (exit 2) if `settings` make the
        server refuse such prompts.
        """
        return settings

    @classmethod
    def replica_settings(cls, settings: Mapping[str, str], replicas: int) -> Mapping[str, str]:
        """The settings of one DP rank, from settings that count for all `replicas` together."""
        return settings

    @classmethod
    def eager_launches(cls, settings: Mapping[str, str]) -> float | None:
        """The host's least seconds to launch a small kernel of a decode step without CUDA graphs. None with graphs.

        It never takes less than in a step with prompts, which is no graph either.
        """
        return None

    def rules_used(self, requested: RequestedRelease) -> str | None:
        """The release whose rules count for another release that was asked for. None if they are its own rules.

        Most engines have the rules of one release only.
        """
        version = self.version
        return None if version is None or requested.text.removeprefix("v") == version.split()[-1] else version

    def reserve(self, question: ReserveInputs) -> Reserve:
        """The memory that the engine does not give to the cache. UsageError (exit 2) for a setting out of range.

        That is the function `reserve` of the module `reserve` in the engine's folder, unless the class has its own.
        """
        reserve: Reserve = part_of(self.name, "reserve").reserve(question)
        return reserve

    @staticmethod
    def device_settings(
        memory_bytes: int, device_name: str, device_class: str | None, release: Release | None,
        given: Mapping[str, str], spec: ModelSpec | None = None,
    ) -> dict[str, str]:  # fmt: skip
        """The default settings that the engine chooses by device and by model (None: any), beside those `given`."""
        return {}

    @staticmethod
    def device_defaults(release: Release | None) -> list[DeviceDefault]:
        """Every default that `device_settings` may give for an option that does not need a device."""
        return []

    @staticmethod
    def context_limits(spec: ModelSpec, release: Release | None) -> tuple[int | None, int | None]:
        """The context of a server without an option for it, and the longest that it accepts. None if not known."""
        return spec.max_position_embeddings, spec.max_position_embeddings

    @classmethod
    def context_defaults(cls, given: Mapping[str, str], defaults: Mapping[str, str], tokens: int) -> dict[str, str]:
        """The defaults that a server's context of `tokens` tokens decides, beside those `given`.

        `defaults` are those of the device.
        """
        return {}

    @classmethod
    def with_default_block(
        cls, spec: ModelSpec, kv_dtype: str, settings: Mapping[str, str], place: Place
    ) -> Mapping[str, str]:
        """`settings` with the default size of a block, if the device or the backend of attention decides it.

        `kv_dtype` is the cache's type.
        """
        option, backend = cls.block_option, settings.get("attention-backend")
        if option is None or backend is None or option in settings:
            return settings
        from kvcalc.engines.starts import backend_block

        block = backend_block(cls.name, place.release, backend)
        return settings if block is None else {**settings, option: str(block)}

    @classmethod
    def default_block(cls, spec: ModelSpec, kv_dtype: str, place: Place) -> int | None:
        """The tokens of a block if the device decides them and the settings do not."""
        return None

    @classmethod
    def known_releases(cls) -> list[str]:
        """The releases that users choose from, as they stand after @."""
        return [release for _, release in dates_of(cls.name)]

    @classmethod
    def prompt_ranks_in(cls, settings: Mapping[str, Any]) -> int:
        """The copies of the attention that divide a prompt, as the settings ask for them."""
        option = cls.prompt_ranks_option
        if option is None or option not in settings:
            return 1
        return SettingsReader(cls.name, {option: str(settings[option])}).count(option)

    @staticmethod
    def split_layers(
        settings: Mapping[str, str], devices: Devices | None, layout: LayoutAsked
    ) -> tuple[Devices | None, LayoutAsked]:
        """The devices, and the tensor-parallel size and the number of stages, if the settings may change them.

        UsageError (exit 2) if the settings contradict the stages or the number of devices.
        """
        return devices, layout

    @classmethod
    def divides_tokens(cls, spec: ModelSpec, vendor: str | None) -> bool:
        """Whether tensor-parallel ranks can divide the tokens of this model's cache on a vendor's devices."""
        return False

    @classmethod
    def weight_padding(
        cls, spec: ModelSpec, gpu: Gpu, dtype: str | None, layout: Layout, stages: Bounds, release: Release | None
    ) -> tuple[tuple[str, int], ...]:  # fmt: skip
        """The name and the bytes of the padding that kernels add to weights, on the largest pipeline stage.

        Nothing is known of an engine without `pads_weights`; the others have a module `loading` with the kernels' sizes
        (`tile_of`).
        """
        if not cls.pads_weights:
            return ()
        from kvcalc.engines.weight_padding import block_padding, expert_padding

        ranks, tiles = layout.tensor_parallel_size, part_of(cls.name, "loading").tile_of(gpu)
        padded = expert_padding(spec, tiles, dtype, ranks, layout.expert_parallel_size, stages)
        return padded if dtype else padded + block_padding(spec, cls.name, release, gpu, ranks, stages)

    @classmethod
    def kept(cls, spec: ModelSpec) -> ModelSpec:
        """The model with the caches that the engine keeps for it, if they are not those that its attention needs."""
        return spec

    def draft_tables(self, method: str, head: ModelSpec | None, ranks: int) -> tuple[tuple[str, int], ...]:
        """Tables of what drafts tokens that take memory on each of `ranks` devices when the cache is sized."""
        return ()

    @classmethod
    def loaded_tables(cls, spec: ModelSpec) -> tuple[tuple[str, int], ...]:
        """The name and the bytes of the tables that every device computes while it loads the model."""
        return ()

    @classmethod
    def prompt_division(cls, spec: ModelSpec, settings: Mapping[str, str]) -> str | None:
        """How copies of the attention divide a prompt, if the command must say so. None if they do not."""
        return None

    def divide_rows(self, spec: ModelSpec, gpu: Gpu, num_devices: int) -> DividedRows | str | None:
        """The weights of a model whose matrices are divided by rows, or the reason why they are not known.

        None if the settings divide the layers instead.
        """
        return None

    @classmethod
    def check_auto_context(cls, settings: Mapping[str, Any], release: Release | None) -> None:
        """Raise UsageError (exit 2) if the engine chooses no context (`auto_context`)."""
        raise UsageError(
            f"--context auto: {cls.name} does not choose a context",
            "llama.cpp and vllm do: --engine llama.cpp; or give --context N",
        )

    @classmethod
    def auto_context(
        cls, settings: Mapping[str, str], longest: int, batch: int, shares_context: bool, release: Release | None
    ) -> AutoContext:
        """How the engine chooses a context for a model of `longest` tokens.

        `shares_context` is whether the `batch` sequences have one context together.
        """
        return AutoContext(longest)

    @classmethod
    def limit_running(
        cls, settings: Mapping[str, str], context_tokens: int, tokens: int, release: Release | None
    ) -> Mapping[str, str]:
        """The settings of a server whose context has `context_tokens`, limited to what runs at once.

        The requests have `tokens` tokens. The settings stay the same if every request may have a whole context.
        """
        return settings

    @abstractmethod
    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        """Bytes one sequence takes in one layer's cache."""

    def held_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        """Bytes that `batch` sequences of `tokens` tokens each take on a device that holds this share."""
        return batch * sequence_bytes(share, dtype, tokens, self.cache_bytes)

    def reads(self, share: ModelSpec, dtype: Dtype) -> Reads:
        """The bytes of this share's cache that one decode step reads, as the engine stores it."""
        return _reads_of(self, share, dtype)

    def entries(self, share: ModelSpec, dtype: Dtype) -> list[Entries]:
        """The caches of this share with the bytes of one entry of each, for `reads`.

        An engine in which layers with the same cache store it differently has its own method.
        """
        return [Entries(cache, n, self.entry_sizes(cache, dtype)) for cache, n in checked_caches(share, dtype)]

    def entry_sizes(self, cache: Cache, dtype: Dtype) -> tuple[int, ...]:
        """The bytes of one entry in each part of a cache that a step reads (`caches.read_entries`)."""
        return entry_sizes(cache, dtype)

    def attended(self, share: ModelSpec) -> ModelSpec:
        """The share as attention reads it, if the settings limit the tokens that the engine keeps."""
        return share

    def longest_context(self, share: ModelSpec, dtype: Dtype, batch: int, memory: int) -> int | None:
        """The longest context for which a batch fits into `memory` bytes (`kv_cache.longest_context`)."""
        return longest_context(lambda tokens: self.batch_bytes(share, dtype, tokens, batch), memory, period(share))

    def start_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int) -> int:
        """Bytes that a device must have for the cache before the engine starts, if that is more than a request takes.

        Else 0.
        """
        return 0

    def start_limit(self, share: ModelSpec, dtype: Dtype, memory: int) -> int | None:
        """The largest limit of running requests (`running_option`) with which the engine starts. None: any.

        `memory` is the number of bytes that a device has for the cache.
        """
        return None

    def batch_line(self, share: ModelSpec, dtype: Dtype, tokens: int) -> BatchLine | None:
        """`batch_bytes` as a line over the batch. None if it is no line, or if that is not known."""
        return None

    def growth_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        """The number of tokens after which the growth repeats: the tokens of a block, or the model's own period."""
        return period(share)

    def block_tokens(self, share: ModelSpec, dtype: Dtype) -> int:
        """The tokens in the smallest block that a request takes as it grows."""
        return self.growth_tokens(share, dtype)

    def pool_limit(self, share: ModelSpec, dtype: Dtype) -> PoolLimit | None:
        """The bytes that the settings allow for the cache on a device. None if they set no limit."""
        return None

    def blocks(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int, memory: int | None) -> PoolFigures:
        """The figures the engine prints for its pool, for a batch and a memory size."""
        return PoolFigures()

    def most_running(
        self, share: ModelSpec, dtype: Dtype, memory: int, prompt_tokens: int, tokens: int, shared_tokens: int = 0
    ) -> int | None:
        """The most requests of `tokens` tokens that run in `memory` bytes, of which one has just computed its prompt.

        They keep their first `shared_tokens` once, as `Prefixes.shared` gives them. None if a request always holds all
        that the engine reserves at its start.
        """
        return None

    def lookahead_tokens(self, num_tokens: int, *, is_longest: bool, by_ngrams: bool) -> int:
        """The slots that a running request takes beyond its own tokens if `num_tokens` tokens are drafted per step.

        `is_longest`: the request is as long as the engine allows. `by_ngrams`: the drafts are n-grams. 0 if the engine
        drafts fewer tokens at the end, as llama.cpp, mlx-lm and Transformers do.
        """
        return 0

    def running_pool(self, share: ModelSpec, dtype: Dtype, longest_tokens: int, batch: int, memory: int) -> RunningPool:
        """The blocks in `memory` bytes for requests of up to `longest_tokens` tokens."""
        size = self.block_tokens(share, dtype)
        pool = self.blocks(share, dtype, longest_tokens, batch, memory).pool
        if pool is None or pool.num_gpu_blocks is None:
            return RunningPool(None)
        return RunningPool(pool.num_gpu_blocks, size, range(-(-longest_tokens // size) + 3))

    def schedule(self) -> Schedule | None:
        """How the engine's scheduler works, with these settings. None if that is not known.

        That is the function `schedule` of the module `scheduler` in the engine's folder, if it has a scheduler.
        """
        schedule: Schedule | None = part_of(self.name, "scheduler").schedule(self) if self.has_scheduler else None
        return schedule

    @classmethod
    def role_in(cls, settings: Mapping[str, str]) -> str | None:
        """PREFILL or DECODE (`kvcalc.engines.command`) if the settings make an instance that does only that."""
        return None

    @classmethod
    def disaggregation(cls) -> Disaggregation | None:
        """What prefill and decode on separate instances need. None if the engine has no such instances."""
        disaggregation: Disaggregation | None = (
            part_of(cls.name, "scheduler").DISAGGREGATION if cls.has_instances else None
        )
        return disaggregation

    def host_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        """Bytes that a batch takes in host memory. 0 if no part of the model is there (`placement`)."""
        return 0

    def divide_cache(self, share: ModelSpec) -> tuple[ModelSpec, ModelSpec]:
        """The layers whose cache is in host memory, and those whose cache is on the device.

        Both are all layers if no part of the model is in host memory (`placement`).
        """
        return share, share

    def max_running_requests(
        self, share: ModelSpec, dtype: Dtype, memory: int | None, tokens: int = 1, shared_tokens: int = 0
    ) -> int | None:
        """The most requests of `tokens` tokens that one DP rank runs at once, by the engine's own limits.

        These are its settings, and its division of `memory`, the bytes that a device has for the cache (None: not
        known). Fewer run if their caches take more than `memory`. None if the engine has no limit. The default is the
        limit for requests of any length. `shared_tokens` of the tokens are kept once for all requests.
        """
        return self._default_running if self._most_asked is None else self._most_asked

    def lines(self, share: ModelSpec, dtype: Dtype, tokens: int) -> list[Line] | None:
        """The parts of one sequence's bytes, which add up to `held_bytes`. None if the engine has no such account."""
        return None

    def pool(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> list[Line] | None:
        """Like `lines`, but for a batch. For engines that allocate for all sequences of a batch at once."""
        return None

    def check_ranks(self, spec: ModelSpec, layout: Layout) -> None:  # noqa: B027 - most engines need no check
        """Raise LayoutError (exit 2) or ModelError (exit 3) if the settings do not suit the ranks of this layout."""

    def check_start(self, start: Start) -> None:
        """Raise LayoutError (exit 2) if the engine refuses to start, with its reason (`starts.yaml` of its folder), and
        UsageError (exit 2) for a vendor's device that is not modelled."""
        if start.gpu is not None and start.gpu.vendor in self.refused_vendors:
            raise UsageError(f"{self.title} on {start.gpu.vendor}'s devices is not modelled", "use --engine logical")
        if has_table(self.name, "starts"):
            from kvcalc.engines.starts import check, rules_of

            release = parse_release(self.name, self.version or "").release
            check(start, rules_of(self.name, release), f"{self.title} {self.version}", self.attention_backend)

    def check_context(self, tokens: int) -> None:  # noqa: B027 - most engines accept any context
        """Raise UsageError (exit 2) for a context that the settings do not allow."""

    def batch_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        """Bytes a batch takes on one rank of the largest pipeline stage."""
        return max([self.held_bytes(stage, dtype, tokens, batch) for stage in self.device_stages(share)])

    def all_stages_bytes(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> int:
        """Bytes a batch takes on one rank of each pipeline stage, summed over the stages."""
        return sum([self.held_bytes(stage, dtype, tokens, batch) for stage in self.device_stages(share)])

    def largest_stage(self, share: ModelSpec, dtype: Dtype, tokens: int, batch: int) -> ModelSpec:
        """The pipeline stage that holds the most bytes."""
        stages = self.device_stages(share)
        if len(stages) == 1:
            return stages[0]
        return max(stages, key=lambda stage: self.held_bytes(stage, dtype, tokens, batch))

    def device_stages(self, share: ModelSpec) -> Sequence[ModelSpec]:
        """The pipeline stages of the layers whose cache is on the device."""
        share = self.divide_cache(share)[1]
        return stages_of(share, self.bounds) if self.bounds else (share,)

    def replica_bytes(self, spec: ModelSpec, dtype: Dtype, tokens: int, batch: int = 1) -> int:
        """Bytes a batch takes in one replica of the model, before it is split over devices."""
        return self.held_bytes(spec, dtype, tokens, batch)

    def prefixes(self, share: ModelSpec, dtype: Dtype, whole: bool = False) -> Prefixes:
        """The prefix cache on a device that holds this share. With `whole`, the share is a replica before it is split.

        Raises UsageError (exit 2) if the engine has none, and ModelError (exit 3) if it is not modelled.
        """
        if self.copies_prefixes:
            from kvcalc.engines.prefixes import CopiedPrefixes

            return CopiedPrefixes(self.name, share, dtype, lambda tokens: self.held_bytes(share, dtype, tokens, 1))
        hint = "leave --prefix-tokens, --turns, --offload and --transfer-bandwidth out, or use another engine"
        raise UsageError(f"{self.name} has no prefix cache for {share.name}", hint)

    @classmethod
    def reuse(cls) -> Reuse:
        """The rules for tiers of memory beside the cache, for hits in it, and for drafts."""
        module, name = cls.reuse_class
        reuse: Reuse = getattr(import_module(f"kvcalc.engines.{module}"), name)(cls.name)
        return reuse

    def growth(self, spec: ModelSpec, dtype: Dtype, tokens: int) -> Growth:
        """How the bytes of one replica grow at a context."""
        return growth(lambda t: self.replica_bytes(spec, dtype, t), tokens, self.growth_tokens(spec, dtype))


@remembered_of_two
def _reads_of(engine: Engine, share: ModelSpec, dtype: Dtype) -> Reads:
    return reads_of(engine.entries(engine.attended(share), dtype))


class NoCache(Engine):
    """Any engine that runs an encoder model: it keeps no cache after the forward pass.

    `of` is that engine's class.
    """

    of: type[Engine]

    def reserve(self, question: ReserveInputs) -> Reserve:
        return self.of.reserve(self, question)

    def stage_bounds(self, num_layers: int, stages: int) -> Bounds:
        return bounds_of(self.of.cut(num_layers, stages))

    def cache_bytes(self, cache: Cache, tokens: int, dtype: Dtype) -> int:
        return 0

    def entries(self, share: ModelSpec, dtype: Dtype) -> list[Entries]:
        return []


def part_of(engine: str, module: str) -> Any:
    """A module in the folder of an engine, which is imported when it is needed."""
    return import_module(f"kvcalc.engines.{ENGINES[engine][0]}.{module}")


@cache
def imported(module: str, name: str) -> type[Engine]:
    """The class `name` of a module in this folder."""
    engine: type[Engine] = getattr(import_module(f"kvcalc.engines.{module}"), name)
    return engine


def not_established(spec: ModelSpec, engine: str, what: str) -> ModelError:
    """The error for a kind of cache, or a model type, whose layout in an engine is not known from its source."""
    return ModelError(f"{spec.name}: {engine}'s layout of {what.replace('_', ' ')} is not modelled")

"""A question about one model as it was asked, and its parts. Their fields are declared in `kvcalc.question.fields`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kvcalc.model.layout import LayoutAsked
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf
from kvcalc.records import NamedTuple
from kvcalc.units import Number

if TYPE_CHECKING:
    from kvcalc.model.drafting import Speculation
    from kvcalc.throughput.hardware import Devices

    class Calibrates(Protocol):
        """Changes the constants of a speed to those of the user's own measurements (see `planning.calibration`)."""

        def apply(self, case: Any, speed: Any) -> Any:
            """The `Speed` of a `Case` with the constants that the measurements determine.

            The types are those of `server.case` and `planning.answers.throughput`, which need this module.
            """


DEFAULT_CONFIDENCE = 65
"""The confidence with which times are compared with their limits.

Of 1,761 measured points of 146 sweeps of layouts, the fastest one that is judged to meet 20, 30 or 50 ms of TPOT loses
the least at 60 to 65 if at most 5 % of these choices may miss the limit (docs/concepts/throughput.md).
"""


class SpeedQuestion(NamedTuple):
    """The options for throughput, in addition to the workload.

    With `input_tokens` and `output_tokens`, requests are served, `concurrency` of them at once (None: as many as fit).
    A length is the mean of lengths that vary by a third, or the text of a distribution such as `fixed:1000`
    (`kvcalc.question.lengths`). With `benchmark`, times are those that a benchmark's client counts from its first
    request on, else those of the steady state. `short_form` takes those of the short form, which searches and fits
    ask again and again; nothing else may. It takes the `repeated_share` of prompts as found in a prefix cache.
    `prefix_hit_rate` is the share of a prompt's tokens that the prefix cache has, from 0 to below 1.
    `expert_parallel_size` is by default all devices of a stage if there are DP ranks, else 1. `confidence` is the
    percentage with which a time is to be at most the one that is judged (`throughput.speed.judged_factor`).
    """

    expert_parallel_size: int | None = None
    input_tokens: int | str | None = None
    output_tokens: int | str | None = None
    concurrency: int | None = None
    calibration: Calibrates | None = None
    prefix_hit_rate: float = 0.0
    confidence: int = DEFAULT_CONFIDENCE
    benchmark: bool = False
    short_form: bool = False
    repeated_share: float = 0.0

    @property
    def prompt_tokens(self) -> int | None:
        """The mean tokens of a prompt."""
        return _mean_of(self.input_tokens)

    @property
    def answer_tokens(self) -> int | None:
        """The mean tokens of an answer."""
        return _mean_of(self.output_tokens)

    @property
    def request_tokens(self) -> int | None:
        """The mean tokens of a request, prompt and answer together, or those of the longest of a distribution.

        None if no requests are served.
        """
        prompt, answer = self.input_tokens, self.output_tokens
        if isinstance(prompt, int) and isinstance(answer, int):
            return prompt + answer
        return self.longest_tokens

    @property
    def longest_tokens(self) -> int | None:
        """The tokens of the longest request that a server must take. None if no requests are served."""
        if self.input_tokens is None or self.output_tokens is None:
            return None
        from kvcalc.question.lengths import known_lengths

        return sum(known_lengths(tokens).longest_tokens for tokens in (self.input_tokens, self.output_tokens))

    @property
    def longest_prompt(self) -> int | None:
        """The tokens of the longest prompt."""
        if self.input_tokens is None:
            return None
        from kvcalc.question.lengths import known_lengths

        return known_lengths(self.input_tokens).longest_tokens


class CacheReuse(NamedTuple):
    """How a cache is used again.

    Every request begins with the same `prefix_tokens` tokens. A session has `turns` turns, of which the last one has
    the length of the question; each turn repeats the session so far. `offload` has the bytes of each tier of memory,
    of one replica, and `bandwidths` its rate in bytes per second if that is given. `transfer` is the link between a
    prefill and a decode instance: bytes per second of one device, or the name of a link.
    """

    prefix_tokens: int = 0
    turns: int | None = None
    offload: tuple[tuple[str, int], ...] = ()
    bandwidths: tuple[tuple[str, int], ...] = ()
    transfer: int | str | None = None


class ImagesAsked(NamedTuple):
    """Every request has `number` images of `width` x `height` pixels."""

    number: int
    width: int
    height: int


class Question(NamedTuple):
    """A question before its defaults are resolved. None and `auto` mean the default.

    The engine `auto` is the one that people start on the devices (`engines.default_engine`).
    `kv_memory_bytes` is the memory for the cache on one device. With `devices` it replaces the memory that the engine's
    reserve would leave. `weights_bytes` replaces the counted weights on a device. The model runs on `devices`; without
    a `tensor_parallel_size` it is split over all of them. `speed` has the options for throughput. If it includes the
    lengths of requests, the context is the prompt and the
    answer of one request, and `batch_size` follows from the requests. `engine_settings` maps the engine's own options
    to their text; a flag may be True or False. `what_if` replaces the model's attention. `speculative` says how tokens
    are drafted, or is None if they are not. `data_parallel_size` is the number of DP ranks. With
    `fits_context` the context is the longest one that fits, as the engine chooses it (`planning.answers.load`). `reuse`
    says how a cache is used again, and `images` are those in every request, whose tokens are a part of the context.
    """

    model: ModelSpec
    context_tokens: int | None = None
    batch_size: int = 1
    dtype: str | None = None
    kv_dtype: str = "auto"
    engine: str = "auto"
    engine_settings: Mapping[str, Any] | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1
    encoder_tokens: int | None = None
    kv_memory_bytes: int | None = None
    weights_bytes: int | None = None
    devices: Devices | None = None
    speed: SpeedQuestion | None = None
    what_if: WhatIf = WhatIf()
    speculative: Speculation | None = None
    data_parallel_size: int = 1
    fits_context: bool = False
    reuse: CacheReuse | None = None
    images: ImagesAsked | None = None

    @property
    def layout(self) -> LayoutAsked:
        """How the model is to be split over devices."""
        experts = None if self.speed is None else self.speed.expert_parallel_size
        return LayoutAsked(self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size, experts)

    def with_layout(self, layout: LayoutAsked) -> Question:
        """The same question about another layout. A size that this does not name stays what it is."""
        tensor, stages, dp_ranks, experts = layout.over(self.layout)
        speed = self.speed if experts is None else self.speed_asked._replace(expert_parallel_size=experts)
        return self._replace(
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages or 1,
            data_parallel_size=dp_ranks or 1,
            speed=speed,
        )

    @property
    def serves_requests(self) -> bool:
        return self.speed is not None and self.speed.request_tokens is not None

    @property
    def speed_asked(self) -> SpeedQuestion:
        """`speed`, or one without options."""
        return self.speed or SpeedQuestion()

    @property
    def asks_several(self) -> bool:
        """Whether the engine is `all` or a list."""
        return self.engine == "all" or "," in self.engine


def _mean_of(tokens: int | str | None) -> int | None:
    """The mean length, rounded. None if there is none."""
    if not isinstance(tokens, str):
        return tokens
    from kvcalc.question.lengths import parse_distribution

    return round(parse_distribution(tokens, "tokens").mean_tokens)


def setting_texts(given: Mapping[str, Any]) -> dict[str, str]:
    """An engine's settings as text, without those that are None or False. A number needs no unit.

    A percentage becomes the number that the engine's own command takes: `90%` is `0.9`.
    """
    return {
        name: Number(value) if isinstance(value, (int, float, Number)) and value is not True else _setting(str(value))
        for name, value in given.items()
        if value is not None and value is not False
    }


def _setting(text: str) -> str:
    number = text.strip().removesuffix("%")
    if number != text.strip() and number.replace(".", "", 1).isdecimal():
        return f"{float(number) / 100:.10g}"
    return text.casefold()

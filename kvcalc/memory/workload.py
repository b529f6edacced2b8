"""The workload of a model, with all defaults resolved and all notes collected."""

from __future__ import annotations

from kvcalc.errors import LayoutError, UsageError
from kvcalc.memory.dtypes import Dtype, parse_dtype, parse_weight_dtype
from kvcalc.model.caches import Cache, CrossAttention, RecurrentState
from kvcalc.model.layout import Layout
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, distinct_caches, has_cross_attention, kv_head_counts, map_caches
from kvcalc.notes import Note
from kvcalc.records import NamedTuple

DEFAULT_CONTEXT_TOKENS = 4096
_DEFAULT_DTYPE = "bf16"

# Codes of the notes that a sweep replaces with one text for all its contexts.
BEYOND_MODEL, ENCODER_AS_CONTEXT = "beyond-model", "encoder-as-context"


class Workload(NamedTuple):
    """`batch_size` sequences of `context_tokens` tokens, cached in `kv_dtype`, on a replica split as in `layout`.

    `encoder_tokens` is the length of the encoder's output, or None if the model has no cross-attention.
    """

    context_tokens: int
    batch_size: int
    kv_dtype: Dtype
    model_dtype: Dtype
    layout: Layout
    notes: tuple[Note, ...]
    encoder_tokens: int | None = None

    @property
    def attention_batch(self) -> int:
        """The sequences that the busiest DP rank runs."""
        return self.layout.attention_batch(self.batch_size)


def resolve_workload(
    spec: ModelSpec,
    context_tokens: int | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    kv_dtype: str | Dtype = "auto",
    layout: Layout = Layout(),
    encoder_tokens: int | None = None,
) -> Workload:
    """Fill in the defaults, and check everything that does not depend on an engine.

    - `context_tokens` defaults to min(4096, the model's longest context). A longer one is accepted with a warning.
    - `encoder_tokens` defaults to the model's own length, or else to the context with a warning.
    - `kv_dtype` "auto" is `dtype` if it has 16 or 32 bits, else the config's torch_dtype, else bf16 with a warning. A
      Dtype is a type that an engine has already chosen.

    Raises UsageError (exit 2) for an unknown dtype, a tensor-parallel size that does not divide the model, more
    pipeline stages than layers, or an encoder length that the model does not support.
    """
    notes: list[Note] = []
    context_tokens, beyond = resolve_context(spec, context_tokens)
    notes += [beyond] if beyond else []
    check_tensor_parallel(spec, layout.tensor_parallel_size)
    if layout.pipeline_parallel_size > max(spec.num_layers, 1):
        raise LayoutError(
            f"--pipeline-parallel-size {layout.pipeline_parallel_size}: the model has {spec.num_layers} layers",
            f"at most --pp {spec.num_layers}",
        )
    is_auto = isinstance(kv_dtype, str) and kv_dtype.casefold() == "auto"
    model_dtype = _resolve_model_dtype(spec, dtype, notes)
    if isinstance(kv_dtype, str):
        kv_dtype = model_dtype if is_auto else parse_dtype(kv_dtype, "--kv-dtype")
    encoder = _resolve_encoder_tokens(spec, encoder_tokens, context_tokens, notes)
    return Workload(context_tokens, batch_size, kv_dtype, model_dtype, layout, tuple(notes), encoder)


def resolve_context(spec: ModelSpec, context_tokens: int | None) -> tuple[int, Note | None]:
    """The context, by default min(4096, the model's longest), and a note if it is beyond the model's limit."""
    longest = spec.longest_context
    if context_tokens is None:
        return min(DEFAULT_CONTEXT_TOKENS, longest) if longest else DEFAULT_CONTEXT_TOKENS, None
    if longest is None or context_tokens <= longest:
        return context_tokens, None
    text = f"context {context_tokens:,} is beyond the model's max_position_embeddings of {longest:,}"
    if longest != spec.max_position_embeddings:
        text = f"context {context_tokens:,} is beyond the model's longest context of {longest:,}"
    return context_tokens, Note("workload", BEYOND_MODEL, text)


def bind_workload(spec: ModelSpec, workload: Workload) -> ModelSpec:
    """`spec` completed with facts from the workload.

    Cross-attention gets the encoder's length. Recurrent states that name no dtype get the model's dtype, because they
    do not follow the dtype of the cache.
    """
    if not _has_open_caches(spec):
        return spec
    return _bind(spec, workload.encoder_tokens, workload.model_dtype.name)


@remembered
def _has_open_caches(spec: ModelSpec) -> bool:
    return any(isinstance(cache, (CrossAttention, RecurrentState)) for cache, _ in distinct_caches(spec))


@remembered
def _bind(spec: ModelSpec, encoder_tokens: int | None, dtype: str) -> ModelSpec:
    return map_caches(spec, lambda cache: _bound(cache, encoder_tokens, dtype))


def _bound(cache: Cache, encoder_tokens: int | None, dtype: str) -> Cache:
    if isinstance(cache, CrossAttention):
        return cache._replace(encoder_tokens=encoder_tokens)
    if not isinstance(cache, RecurrentState):
        return cache
    return cache._replace(conv_dtype=cache.conv_dtype or dtype, state_dtype=cache.state_dtype or dtype)


def _resolve_encoder_tokens(spec: ModelSpec, given: int | None, context: int, notes: list[Note]) -> int | None:
    of_model = spec.encoder_tokens
    if not has_cross_attention(spec):
        if given is not None:
            raise UsageError(f"--encoder-tokens: {spec.name} has no cross-attention to an encoder")
        return None
    if given is not None:
        if spec.has_fixed_encoder and given != of_model:
            raise UsageError(f"--encoder-tokens {given}: the encoder of {spec.name} always outputs {of_model:,} tokens")
        return given
    if of_model is None:
        assumed = f"assuming an encoder input as long as the context ({context:,} tokens); set --encoder-tokens"
        notes.append(Note("workload", ENCODER_AS_CONTEXT, assumed))
        return context
    if not of_model:
        nothing = "no image is counted, so cross-attention keeps nothing; set --encoder-tokens to count images"
        notes.append(Note("workload", "no-image", nothing))
    return of_model


def _resolve_model_dtype(spec: ModelSpec, dtype: str | None, notes: list[Note]) -> Dtype:
    """The dtype the model computes in: `dtype` if it has 16 or 32 bits, else the config's torch_dtype, else bf16."""
    scheme = parse_weight_dtype(dtype)
    if scheme is not None and scheme.is_float:
        return scheme
    if spec.torch_dtype is None:
        assumed = f"the config names no dtype; assuming {_DEFAULT_DTYPE} (set --dtype to change it)"
        notes.append(Note("model", "no-dtype", assumed))
    return parse_dtype(spec.torch_dtype or _DEFAULT_DTYPE, "torch_dtype")


@remembered
def check_tensor_parallel(spec: ModelSpec, size: int) -> None:
    """Raise LayoutError if the model cannot be split over `size` devices.

    Attention heads must split evenly. KV heads must split evenly or be replicated evenly. vLLM has the same conditions
    (verify_with_parallel_config, vllm/config/model.py, and QKVParallelLinear, vLLM 0.33.0).
    """
    heads = spec.attention.num_heads
    if heads % size:
        divisors = [str(n) for n in range(2, min(heads, 16) + 1) if heads % n == 0]
        raise LayoutError(
            f"--tp {size} does not divide the {heads} attention heads", f"try {', '.join(divisors) or '1'}"
        )
    for group in spec.layers:
        for cache in group.caches:
            if isinstance(cache, RecurrentState) and not cache.splits_evenly(size):
                raise LayoutError(f"--tp {size} does not divide the channels and heads of the recurrent state")
    for kv_heads in kv_head_counts(spec):
        if kv_heads % size and size % kv_heads:
            raise LayoutError(f"--tp {size} is neither a divisor nor a multiple of the {kv_heads} KV heads")

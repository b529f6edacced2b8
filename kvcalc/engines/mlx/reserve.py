"""What mlx-lm needs beside weights and cache."""

from __future__ import annotations

from kvcalc.engines.declarations import types_of
from kvcalc.engines.mlx.models import CONTIGUOUS_STATES_SINCE, rotates
from kvcalc.engines.options import SettingsReader
from kvcalc.engines.reserve import ACTIVATION, MIB, Held, Reserve, ReserveInputs
from kvcalc.errors import UsageError
from kvcalc.model.caches import RecurrentState
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.spec import ModelSpec, all_caches

# Metal has one fused kernel for prompts: for keys and values of one of these widths. Other widths compute the scores of
# all heads as one array of 16 bits, and a mask of a byte. Source: ScaledDotProductAttention::use_fallback
# (mlx/backend/metal/scaled_dot_product_attention.cpp) in MLX 0.31.0 to 0.32.1, and `fallback` in mlx/fast.cpp, whose
# mask and softmax write into the scores.
_FUSED_WIDTHS = (64, 80, 128)
_SCORE_BYTES, _MASK_BYTES = 2, 1
# A command buffer ends after this many operations, or once its arrays have this many bytes. The arrays of eleven
# buffers are held: ten that wait and the one that is filled. Source: CommandEncoder::needs_commit
# (mlx/backend/metal/device.cpp; 50 and 50 MiB on a Max or an Ultra) and MAX_ACTIVE_TASKS (mlx/transforms.cpp), MLX
# 0.32.1.
_BUFFERS, _BUFFER_OPERATIONS, _BUFFER_BYTES = 11, 40, 40 * MIB


def reserve(question: ReserveInputs) -> Reserve:
    """The activations of one step of a prompt. The share that macOS reserves is added for every engine.

    MLX wires memory up to Metal's recommendedMaxWorkingSetSize (wired_limit, mlx_lm/generate.py) and reuses freed
    buffers within it (MetalAllocator, mlx/backend/metal/allocator.cpp). A prompt is processed in steps of
    --prefill-step-size tokens. A step of MLA computes the scores of all heads as one array of 16 bits (pe_scores of
    models/deepseek_v3.py), and so does attention without a fused kernel. Logits are computed for the last token only.
    A step also copies K and V of a layer into a longer array (KVCache.update_and_fetch, models/cache.py).
    """
    if not question.is_apple:
        raise UsageError("--engine mlx: only Apple's devices are modelled", "for example --gpu m3-ultra")
    step = min(SettingsReader("mlx", question.settings).count("prefill-step-size"), question.context_tokens)
    tokens = question.batch_size * step
    pending = min(_BUFFER_BYTES, _BUFFER_OPERATIONS * tokens * question.width.hidden_size * 2)
    held = [
        Held(ACTIVATION, f"activations of {step:,} tokens", question.step_activations(tokens)),
        Held(ACTIVATION, f"arrays of {_BUFFERS} command buffers", _BUFFERS * pending),
    ]
    if question.spec is not None:
        scores, copied = _scores(question, question.spec, step), _largest_cache(question, question.spec)
        held += [Held(ACTIVATION, "scores of attention", scores)] if scores else []
        held += [Held(ACTIVATION, "copy of a layer's cache", copied)] if copied else []
        inputs = _convolution_inputs(question, question.spec, tokens)
        held += [Held(ACTIVATION, "inputs of convolutions", inputs)] if inputs else []
    return Reserve(held, {}, varies=True)


def _scores(question: ReserveInputs, spec: ModelSpec, step: int) -> int:
    """The bytes of the largest array of scores, and of its mask."""
    largest = 0
    for group in spec.layers:
        for mixer in group.layer.attention:
            shape = mixer.shape
            if shape.is_latent:
                of_pair = shape.num_heads * _SCORE_BYTES
            elif shape.qk_head_dim == shape.v_head_dim and shape.qk_head_dim in _FUSED_WIDTHS:
                continue
            else:
                of_pair = shape.num_heads * _SCORE_BYTES + _MASK_BYTES
            largest = max(largest, step * _keys(mixer, question, spec, step) * of_pair)
    return question.batch_size * largest


def _keys(mixer: Attention, question: ReserveInputs, spec: ModelSpec, step: int) -> int:
    """The tokens whose keys a step reads. A rotating cache is longer than its window by the step, but for a token."""
    if mixer.window is None or not rotates(spec):
        return question.context_tokens
    return min(question.context_tokens, mixer.window + step - 1)


def _convolution_inputs(question: ReserveInputs, spec: ModelSpec, tokens: int) -> int:
    """The bytes of a step's inputs that older releases keep, because a delta net's state is a view of their end.

    Source: ml-explore/mlx-lm#1077, in mlx-lm 0.31.2.
    """
    is_older = question.release is not None and question.release < CONTIGUOUS_STATES_SINCE
    if not is_older or spec.model_type not in types_of("mlx", "delta_nets"):
        return 0
    channels = sum(
        group.num_layers * cache.conv_channels
        for group in spec.layers for cache in group.caches if isinstance(cache, RecurrentState)
    )  # fmt: skip
    return tokens * channels * 2


def _largest_cache(question: ReserveInputs, spec: ModelSpec) -> int:
    """The bytes of K and V of one layer, of 16 bits."""
    elements = max((sum(cache.token_rows()) for cache in all_caches(spec) if cache.token_rows()), default=0)
    return question.batch_size * question.context_tokens * elements * 2

"""The images in a request: their tokens, and the cache of their embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.model.towers.images import image_rule, image_tokens
from kvcalc.question.question import ImagesAsked
from kvcalc.units import check_count

if TYPE_CHECKING:
    import kvcalc.documents as documents


def check_images(spec: ModelSpec, asked: ImagesAsked, context_tokens: int) -> None:
    """Check that the images fit in the context.

    Raises UsageError (exit 2) if they have more tokens, and ModelError (exit 3) if the model takes no images.
    """
    check_count(asked.number, "images")
    each = image_tokens(spec, asked.width, asked.height, asked.number)
    if asked.number * each > context_tokens:
        tokens = f"{asked.number * each:,} tokens"
        images = f"{asked.number:,} images of {each:,} tokens" if asked.number > 1 else "the image"
        raise UsageError(
            f"--images {asked.number}: {images} take {tokens}, and the context is {context_tokens:,}",
            f"for example --context {asked.number * each + 4096}",
        )


def describe_images(
    images: ImagesAsked, model: ModelSpec, context_tokens: int, step_tokens: int | None, element_bytes: int
) -> documents.Images | None:  # fmt: skip
    """The `images` part of a workload, or None if the model's rule is not known.

    `step_tokens` are the tokens in one step of vLLM if it loads the tower, else None: other engines' caches of
    embeddings are not counted. `element_bytes` is the size of an element of an embedding. vLLM keeps the embeddings
    of images until their tokens are computed: as many as one step has tokens, and at least those of the largest image
    (compute_encoder_budget, v1/core/encoder_cache_manager.py, 0.33.0).
    """
    rule = image_rule(model)
    if rule is None:
        return None
    each, cached, size = rule.each(images.width, images.height, images.number), None, None
    if step_tokens is not None:
        cached = max(step_tokens, rule.most_at(context_tokens))
        size = cached * (model.attention.hidden_size or 0) * rule.rows * element_bytes
    return {
        "count": images.number,
        "width": images.width,
        "height": images.height,
        "tokens_per_image": each,
        "tokens": images.number * each,
        "encoder_cache_tokens": cached,
        "encoder_cache_bytes": size,
    }

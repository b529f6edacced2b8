"""What drafts tokens in speculative decoding: its layers, its weights, and what it keeps in the cache.

The drafting part is described like a model, with the same layers, so that its bytes, its split over devices and its
time come from the same functions as the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.errors import UsageError
from kvcalc.model.caches import RecurrentState
from kvcalc.model.layers import Layer, LayerGroup
from kvcalc.model.memo import remembered, remembered_of_two
from kvcalc.model.mixers.attention import Attention
from kvcalc.model.spec import ModelSpec, has_cross_attention, weights_of
from kvcalc.model.tensors import HEAD, LINEAR, Block, ModelWeights, Weight, norm, other
from kvcalc.records import NamedTuple

MTP, EAGLE, EAGLE1, DFLASH, DRAFT, NGRAM = METHODS = ("mtp", "eagle", "eagle1", "dflash", "draft", "ngram")
WITH_DRAFT_MODEL = (EAGLE, EAGLE1, DFLASH, DRAFT)
"""Methods that take a draft model, or the config of a head."""
SAME_METHODS = {"eagle2": EAGLE1, "eagle3": EAGLE}
"""Other names of methods. EAGLE-2 drafts other tokens than EAGLE-1 with the same head."""
MOST_TOKENS = 64
"""More tokens than an engine drafts in one step."""


class Speculation(NamedTuple):
    """Speculative decoding: each step drafts `num_tokens` tokens, and the model checks them all at once.

    `method` is one of `METHODS`; `eagle` is EAGLE-3. `acceptance_length` is the mean number of tokens that a step gives
    a sequence, with the one that the model computes itself: from 1 to `num_tokens` + 1. Only the speed needs it.
    `draft_model` is the model that drafts (`draft`), or the config of a head (`eagle`, `eagle1`, `dflash`).
    """

    method: str
    num_tokens: int
    acceptance_length: float | None = None
    draft_model: ModelSpec | None = None

    def __str__(self) -> str:
        return f"{self.method}:{self.num_tokens}"


class Drafter(NamedTuple):
    """The part that drafts tokens.

    `spec` has the layers of one pass, and `read` the weights of one pass: the layers, and the output head, which may be
    the model's own. `layers` are all drafting layers, and `held` their weights without the tables that they share with
    the model; both weights are None if they are not known. `like_model`: the weights are stored like the model's.
    `is_model`: it is a model of its own, with a dtype of its own.
    """

    spec: ModelSpec
    layers: tuple[LayerGroup, ...]
    read: ModelWeights | None
    held: ModelWeights | None
    like_model: bool = False
    is_model: bool = False


def mtp_like(spec: ModelSpec) -> LayerGroup:
    """The layers that a multi-token prediction layer (MTP) is like: the last of the attention layers with most caches.

    Source: DeepSeekMTP, GlmMoeDsaMTP and Qwen3_5MTP of vLLM 0.33.0: one decoder layer of the model's own kind, with an
    indexer if the family has one. If the config describes the mixers of that layer, they replace the layer's own.
    """
    if spec.draft_mixers:
        last = spec.layers[-1]
        layer = last.layer._replace(mixers=spec.draft_mixers)
        return last._replace(caches=layer.caches, layer=layer)
    attending = [group for group in spec.layers if any(not isinstance(c, RecurrentState) for c in group.caches)]
    return max(attending, key=lambda group: (len(group.caches), group.last))


@remembered_of_two
def drafter_of(spec: ModelSpec, draft_model: ModelSpec | None, method: str) -> Drafter | None:
    """What drafts tokens for `spec`, which is bound to its workload, like `draft_model`. None for n-grams.

    Raises UsageError (exit 2) if the model cannot be drafted for in this way.
    """
    if method == NGRAM:
        return None
    if method == MTP:
        return _mtp(spec)
    if method in (EAGLE, EAGLE1):
        return _eagle(spec, draft_model, method)
    if draft_model is None:
        raise ValueError("the method needs a draft model")
    if method == DFLASH:
        return _dflash(spec, draft_model)
    if draft_model.is_encoder or has_cross_attention(draft_model):
        raise UsageError(
            f"--draft-model {draft_model.name}: only a decoder without cross-attention can draft tokens",
            "use a small model of the same family",
        )
    if reads_cache(draft_model) and draft_model.stated.get("backbone_hidden_size") != spec.attention.hidden_size:
        raise UsageError(
            f"--draft-model {draft_model.name}: it drafts for a model of a different width than {spec.name}",
            "give the drafter of this model",
        )
    weights = weights_of(draft_model)
    return Drafter(draft_model, draft_model.layers, weights, weights, is_model=True)


def reads_cache(model: ModelSpec) -> bool:
    """Whether a model keeps nothing, because it only reads the cache of the model that it drafts for (Gemma 4)."""
    return not any(group.caches for group in model.layers)


@remembered_of_two
def with_drafter(spec: ModelSpec, drafter: Drafter | None) -> ModelSpec:
    """`spec` with the layers that draft tokens after its own, so that their cache is counted with the model's."""
    first = spec.num_layers
    layers = () if drafter is None else drafter.layers
    moved = (group._replace(first=first + group.first, last=first + group.last) for group in layers)
    return spec._replace(layers=(*spec.layers, *moved), first_draft_layer=first)


def _mtp(spec: ModelSpec) -> Drafter:
    """The MTP layers of the config.

    A layer concatenates the normed embedding and the normed hidden state, projects them to the model's width, and runs
    one decoder layer and a norm. It shares the embedding and the output head with the model. Each pass runs one layer;
    further passes reuse the layers in turn. Every rank is counted with the whole projection, in 16 or 32 bits.
    Source: DeepSeekMultiTokenPredictorLayer (deepseek_mtp.py) and Qwen3_5MultiTokenPredictor (qwen3_5_mtp.py) of vLLM;
    DeepSeek-V3 technical report, section 2.2.
    """
    if not spec.num_draft_layers:
        raise UsageError(
            f"--speculative mtp: {spec.name} has no multi-token prediction (MTP) layers",
            "use eagle, draft with --draft-model MODEL, or ngram, for example --speculative ngram:3",
        )
    like, width = mtp_like(spec), spec.attention.hidden_size or 0
    more = (other("eh_proj", width, 2 * width), *(norm(name, width) for name in ("enorm", "hnorm", "shared_head.norm")))
    group = LayerGroup(0, spec.num_draft_layers - 1, like.caches, like.layer._replace(mlp=(*like.layer.mlp, *more)))
    return _sharing(spec, (group,), one_pass=(group._replace(last=0),), like_model=True)


@remembered
def draft_layers_of_file(spec: ModelSpec) -> ModelWeights | None:
    """The MTP layers in the GGUF file that the model's name stands for. None if it has none.

    llama.cpp stores their projection like other matrices (nextn.eh_proj), and loads them only to draft (load_mtp,
    src/llama-model-loader.cpp, llama-cpp-python 0.3.36).
    """
    file = spec.named_file
    held = None if file is None or not file.has_draft_layers or not spec.num_draft_layers else _mtp(spec).held
    if held is None:
        return None
    blocks = []
    for block in held.blocks:
        stored = (weight._replace(role=LINEAR) if weight.name == "eh_proj" else weight for weight in block.weights)
        blocks.append(Block(block.prefix, block.numbers, tuple(stored)))
    return ModelWeights(held.embedding, held.tied, tuple(blocks))


def _eagle(spec: ModelSpec, head: ModelSpec | None, method: str) -> Drafter:
    """An EAGLE head: decoder layers that also read hidden states of the model. Its weights are in 16 or 32 bits.

    EAGLE-3: a projection joins some of the model's hidden states, three by default, and the query, key and value
    projections of the first layer read the embedding beside it, so they are twice as wide. EAGLE-1 and EAGLE-2: a
    projection joins the embedding and the model's last hidden state, and the first layer has no norm at its input.
    Source: llama_eagle3.py and llama_eagle.py of vLLM 0.33.0 and of SGLang 0.5.23.

    Without the head's config, the layer is like the model's last one and shares the model's output head (EAGLE paper,
    section 4.1: one decoder layer of the model). With it, the layers are the config's, and `draft_vocab_size` sets an
    output head of its own.
    """
    if head is None and not _is_plain(spec):
        raise UsageError(
            f"--speculative {method}: the config of {spec.name} does not tell what its EAGLE head looks like",
            "give the head's own config.json: --draft-model PATH",
        )
    _check_head(head)
    like = spec if head is None else head
    head_layers = (mtp_like(spec)._replace(first=0, last=0),) if head is None else head.layers
    first, *others = _split_first(head_layers)
    width = like.attention.hidden_size or 0
    if method == EAGLE1:
        layer = first.layer._replace(norms=first.layer.norms[1:], mlp=(*first.layer.mlp, other("fc", width, 2 * width)))
        return _sharing(spec, (first._replace(layer=layer), *others), like=head)
    stated = like.stated.get("target_hidden_size")
    states = _num_hidden_states(like) * (stated if isinstance(stated, int) else spec.attention.hidden_size or width)
    more = (other("fc", width, states), norm("norm", width), norm("hidden_norm", width), *_doubled(first.layer))
    groups = [first._replace(layer=first.layer._replace(mlp=(*first.layer.mlp, *more)))]
    for group in others:
        layer = group.layer._replace(mlp=(*group.layer.mlp, norm("hidden_norm", width)))
        groups.append(group._replace(layer=layer))
    if head is None:
        return _sharing(spec, tuple(groups))
    rows = head.stated.get("draft_vocab_size")
    own_head = Weight("lm_head", rows, width, HEAD) if isinstance(rows, int) and rows > 0 else None
    return _sharing(spec, tuple(groups), like=head, own_head=own_head)


def _dflash(spec: ModelSpec, head: ModelSpec) -> Drafter:
    """A DFlash head: a few layers that draft a block of tokens in one pass, from hidden states of some of the layers.

    A projection joins the hidden states, and the layers keep K and V of all tokens. The embedding and the output head
    are the model's. Source: DFlashDraftModel, models/dflash.py, SGLang 0.5.23, and qwen3_dflash.py, vLLM 0.33.0.
    """
    _check_head(head)
    width, nested = head.attention.hidden_size or 0, head.stated.get("dflash_config")
    config = {**head.stated, **nested} if isinstance(nested, Mapping) else head.stated
    read = config.get("target_layer_ids")
    number = len(read) if isinstance(read, list) else head.num_layers
    first, *others = _split_first(head.layers)
    more = (other("fc", width, number * width), norm("hidden_norm", width), norm("norm", width))
    layer = first.layer._replace(mlp=(*first.layer.mlp, *more))
    return _sharing(spec, (first._replace(layer=layer), *others), like=head)


def _check_head(head: ModelSpec | None) -> None:
    if head is not None and not all(_attends(group.layer) for group in head.layers):
        raise UsageError(
            f"--draft-model {head.name}: not a head that drafts, whose layers all have attention",
            "for a small model that drafts: --speculative draft:N --draft-model MODEL",
        )


def _split_first(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """The same layers, with a group for the first one alone."""
    first, *others = groups
    rest = (first._replace(first=first.first + 1),) if first.num_layers > 1 else ()
    return (first._replace(last=first.first), *rest, *others)


def _num_hidden_states(head: ModelSpec) -> int:
    """How many of the model's hidden states an EAGLE-3 head reads: as its config says, or three."""
    nested = head.stated.get("eagle_config")
    number, read = head.stated.get("num_aux_hidden_states"), None
    if isinstance(nested, Mapping):
        read = nested.get("eagle_aux_hidden_state_layer_ids")
    return number if isinstance(number, int) else len(read) if isinstance(read, list) and read else 3


def _sharing(
    spec: ModelSpec,
    layers: tuple[LayerGroup, ...],
    *,
    one_pass: tuple[LayerGroup, ...] | None = None,
    like: ModelSpec | None = None,
    own_head: Weight | None = None,
    like_model: bool = False,
) -> Drafter:
    """A drafter with `layers`, which shares the model's embedding, and the model's output head unless it has its own.

    A pass runs the layers of `one_pass`, or all. In everything else the drafter is `like` a model: its own config's, or
    the one that it drafts for.
    """
    passed = one_pass or layers
    alone = (like or spec)._replace(layers=passed, num_draft_layers=None)
    around = spec.around
    if around is None:
        return Drafter(alone, layers, None, None, like_model)

    # The layers come after the model's in the checkpoint, and so do their names.
    first = spec.num_layers

    def blocks(groups: tuple[LayerGroup, ...]) -> tuple[Block, ...]:
        return tuple(Block(around.prefix, range(first + g.first, first + g.last + 1), g.layer.weights) for g in groups)

    ends = (weight for block in around.blocks for weight in block.weights if weight.role == HEAD)
    heads = tuple(ends) if own_head is None else (own_head,)
    read = ModelWeights(
        around.embedding, around.tied and own_head is None, (*blocks(passed), Block("", (0,), heads))
    )  # fmt: skip
    kept = () if own_head is None else (Block("", (0,), (own_head,)),)
    held = ModelWeights(around.embedding._replace(rows=0), False, (*blocks(layers), *kept))
    return Drafter(alone, layers, read, held, like_model)


def _doubled(layer: Layer) -> list[Weight]:
    """The second halves of the query, key and value projections, which read the hidden state beside the embedding."""
    repeated = []
    for mixer in layer.attention:
        names = mixer.names
        entering = {names.query, names.key, names.value, names.fused}
        repeated += [w._replace(name=f"{w.name}.2") for w in mixer.weights if w.name.rpartition(".")[2] in entering]
    return repeated


def _has_experts(spec: ModelSpec) -> bool:
    return any(weight.copies > 1 for group in spec.layers for weight in group.layer.mlp)


def _is_plain(spec: ModelSpec) -> bool:
    """Whether all layers have attention with K and V, and no experts: then an EAGLE head is like one of them."""
    return (
        not spec.attention.is_latent and not _has_experts(spec) and all(_attends(group.layer) for group in spec.layers)
    )  # fmt: skip


def _attends(layer: Layer) -> bool:
    return bool(layer.mixers) and all(isinstance(mixer, Attention) and mixer.keeps for mixer in layer.mixers)

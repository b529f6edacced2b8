"""A model's config: what every family reads in the same way, and the ModelSpec that a family's reader ends with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvcalc.errors import ModelError
from kvcalc.limits import LAYERS
from kvcalc.model.layers import Layer, Mixer, group_layers
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Around, Weight
from kvcalc.model.type_tables import STATED
from kvcalc.model.typed_config import MAX_INTEGER as MAX_INTEGER
from kvcalc.model.typed_config import TypedConfig
from kvcalc.records import NamedTuple

MAX_LAYERS = LAYERS

_DTYPES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}

# The keys for the number of multi-token prediction (MTP) layers, and for the type of recurrent states.
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
_STATE_DTYPES = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")

# Config keys of EAGLE-3 and DFlash heads, which draft tokens.
_OF_HEADS = (
    "draft_vocab_size", "eagle_config", "num_aux_hidden_states", "target_hidden_size", "dflash_config",
    "target_layer_ids",
)  # fmt: skip

# Config keys of the rotation of queries and keys by their position.
_OF_ROTATION = (
    "rope_parameters", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_dim",
    "original_max_position_embeddings",
)  # fmt: skip

# Keys under which published configs describe a tower (`kvcalc.model.towers`). The first that is there counts.
TOWER_KEYS: dict[str, tuple[str, ...]] = {
    "vision": (
        "vision_config", "vision_encoder_config", "vit_config", "visual", "img_processor", "mm_vision_tower",
        "visual_tokenizer_config", "timm_model_ids",
    ),
    "audio": (
        "audio_config", "audio_encoder_config", "audio_encoder", "audio_processor", "speech_config", "sound_config",
        "encoder_config",
    ),
}  # fmt: skip


class Body(NamedTuple):
    """The weights of a model outside its mixers: the MLPs and norms of the layers, and the weights around the layers.

    `mlps` has one entry per layer. Identical layers share one object. It is empty if no layer has an MLP.
    """

    around: Around | None = None
    mlps: Sequence[tuple[Weight, ...]] = ()
    norms: tuple[Weight, ...] = ()


def _layers(mixers: Sequence[tuple[Mixer, ...]], body: Body) -> Iterator[Layer]:
    """Yield every layer. Layers with the same mixers and the same MLP are the same object."""
    made: dict[tuple[int, int], Layer] = {}
    for number, mixer in enumerate(mixers):
        mlp = body.mlps[number] if body.mlps else ()
        key = (id(mixer), id(mlp))
        layer = made.get(key)
        if layer is None:
            layer = made[key] = Layer(mixer, mlp, body.norms)
        yield layer


class ConfigReader(TypedConfig):
    """A config.json, or the config of a preset: what the readers of all families ask of it."""

    def per_layer(self, num_layers: int) -> list[Mapping[str, object]] | None:
        """Return the keys of each layer that differ from the config's own; None if no layer differs.

        Transformers 5 saves them in per_layer_config, an object with the layers' numbers as keys. Source:
        PreTrainedConfig.per_layer_config, Transformers 5.23.0.
        """
        stated = self.config.get("per_layer_config")
        if not stated:
            return None
        if not isinstance(stated, Mapping):
            raise self._bad("per_layer_config", stated, "must be an object")
        by_layer: list[Mapping[str, object]] = [{} for _ in range(num_layers)]
        for key, value in stated.items():
            number = int(key) if isinstance(key, str) and key.isdecimal() else -1
            if not 0 <= number < num_layers or not isinstance(value, Mapping):
                raise self._bad("per_layer_config", key, f"must be an object of layers from 0 to {num_layers - 1}")
            by_layer[number] = value
        return by_layer

    def num_layers(self, *keys: str) -> int:
        """Return the number of layers. Raises ModelError if it is more than MAX_LAYERS."""
        return self.integer(*keys, most=MAX_LAYERS)

    def torch_dtype(self) -> str | None:
        """Return the config's dtype by kvcalc's name (fp32, fp16, bf16), or None if the config does not name one.

        Transformers 5 writes `dtype`, older releases wrote `torch_dtype`. "auto" counts as no dtype.
        """
        value = self._look_up(("torch_dtype", "dtype"))
        if value is None or value == "auto":
            return None
        known = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
        if known is None:
            raise self._bad("torch_dtype", value, f"must be one of {', '.join(_DTYPES)}")
        return known

    def head_dim(self, hidden_size: int | None, num_heads: int) -> int:
        """Return the explicit `head_dim`, else hidden_size / num_attention_heads, which must be an integer."""
        explicit = self.optional_integer("head_dim")
        if explicit is not None:
            return explicit
        if hidden_size is None:
            raise ModelError(f"{self.name}: head_dim is missing, and there is no hidden_size to derive it from")
        if hidden_size % num_heads:
            raise ModelError(
                f"{self.name}: num_attention_heads {num_heads} does not divide hidden_size {hidden_size} "
                f"({hidden_size / num_heads:.1f} per head), and there is no explicit head_dim"
            )
        return hidden_size // num_heads

    def check_groups(self, num_heads: int, num_kv_heads: int) -> int:
        """Return `num_kv_heads`. Raises ModelError if it does not divide `num_heads`: groups would differ in size."""
        if num_heads % num_kv_heads:
            raise ModelError(
                f"{self.name}: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
            )
        return num_kv_heads

    def model(
        self,
        model_type: str,
        mixers: Sequence[tuple[Mixer, ...]],
        body: Callable[[], Body] | None = None,
        *,
        attention: AttentionShape | None = None,
        positions: tuple[str, ...] = ("max_position_embeddings",),
        is_encoder: bool = False,
        encoder_tokens: int | None = None,
        has_fixed_encoder: bool = False,
    ) -> ModelSpec:
        """Build the ModelSpec from the mixers of every layer, in order. Every family's reader ends with this call.

        `body` counts the other weights, or is None if the family's weights are not known. If it raises ModelError, the
        spec has no weights, and the error's message is the reason. `attention` defaults to the shape of the first
        attention module. `positions` are the keys for the longest context.
        """
        around, reason = None, f"the weights of model_type {model_type} are not counted"
        weights = Body()
        if body is not None:
            try:
                weights, reason = body(), ""
                around = weights.around
            except ModelError as error:
                reason = error.message
        if attention is None:
            shapes = (mixer.shape for each in mixers for mixer in each if isinstance(mixer, Attention))
            attention = next(shapes, AttentionShape(0, 0, 0, 0, self.optional_integer("hidden_size")))
        draft = next((self.config[key] for key in _DRAFT_LAYERS if self.config.get(key)), None)
        state_dtype = next((self.config[key] for key in _STATE_DTYPES if self.config.get(key)), None)
        return ModelSpec(
            name=self.name,
            source=self.source,
            model_type=model_type,
            attention=attention,
            layers=group_layers(_layers(mixers, weights)),
            max_position_embeddings=self.optional_integer(*positions),
            torch_dtype=self.torch_dtype(),
            is_encoder=is_encoder,
            is_bidirectional=self.config.get("is_causal") is False,
            encoder_tokens=encoder_tokens,
            has_fixed_encoder=has_fixed_encoder,
            around=around,
            weights_reason=reason or None,
            quantization=self._quantization(),
            expert_dtype=self.config.get("expert_dtype"),
            num_draft_layers=draft if isinstance(draft, int) else None,
            state_dtype=state_dtype if isinstance(state_dtype, str) else None,
            stated={
                key: self.config[key]
                for key in (*_OF_HEADS, *_OF_ROTATION, *STATED.get(model_type, "").split())
                if key in self.config
            },
        )

    def _quantization(self) -> object:
        """The quantization_config. mlx_lm.convert before 0.21 wrote only `quantization`, with the same content."""
        stated, mlx = self.config.get("quantization_config"), self.config.get("quantization")
        return mlx if stated is None and isinstance(mlx, Mapping) and {"bits", "group_size"} <= mlx.keys() else stated

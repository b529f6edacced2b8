"""Typed look-ups in a config mapping, each with an error that names the file, the key and the value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvcalc.errors import ModelError, nearest
from kvcalc.model.layers import Layer, Mixer, group_layers
from kvcalc.model.mixers.attention import Attention, AttentionShape
from kvcalc.model.spec import ModelSpec
from kvcalc.model.tensors import Around, Weight

MAX_LAYERS = 2_000
"""More layers than any model has: a larger number is a damaged config."""
MAX_INTEGER = 10**12
"""More than any dimension or count of a model."""

_DTYPES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
_SHOWN = 40

# Where configs count their layers for further tokens, and where they name the type of recurrent states.
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_STATE_DTYPES = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")

# model_type -> published keys an engine, or the converter of its files, reads by rules of its own.
STATED: dict[str, tuple[str, ...]] = {
    "chatglm": ("multi_query_group_num",),
    "hy_v4": ("indexer_types",),
    "mimo_v2_flash": ("sliding_window",),
    "minicpm3": ("num_key_value_heads",),
    "minimax_m3": ("moe_layer_freq", "sparse_attention_config"),
    "minimax_m3_vl_text": ("moe_layer_freq", "sparse_attention_config"),
    "mt5": ("num_layers",),
    "nemotron-nas": ("block_configs",),
    "t5": ("num_layers",),
    "umt5": ("num_layers",),
    "whisper": ("encoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
}


class Body(NamedTuple):
    """The weights of a model that are not its mixers': MLPs and norms of the layers, and what stands around them.

    `mlps` has one entry for every layer, the same object where layers are alike; empty where no layer has an MLP.
    """

    around: Around | None = None
    mlps: Sequence[tuple[Weight, ...]] = ()
    norms: tuple[Weight, ...] = ()


def _layers(mixers: Sequence[tuple[Mixer, ...]], body: Body) -> Iterator[Layer]:
    """Every layer; layers that have the same mixers and the same MLP are one object."""
    made: dict[tuple[int, int], Layer] = {}
    for number, own in enumerate(mixers):
        mlp = body.mlps[number] if body.mlps else ()
        key = (id(own), id(mlp))
        layer = made.get(key)
        if layer is None:
            layer = made[key] = Layer(own, mlp, body.norms)
        yield layer


class ConfigReader:
    """A config mapping with the name and source it came from. Look-ups take a key and its aliases, best known first."""

    def __init__(self, config: Mapping[str, object], name: str, source: str) -> None:
        self.config = config
        self.name = name
        self.source = source

    def with_defaults(self, defaults: Mapping[str, object]) -> ConfigReader:
        """The same config with a family's defaults for keys that are absent. An explicit null stays null."""
        return ConfigReader({**defaults, **self.config}, self.name, self.source) if defaults else self

    def without(self, key: str) -> ConfigReader:
        """The same config but for `key`."""
        return ConfigReader({k: v for k, v in self.config.items() if k != key}, self.name, self.source)

    def nested(self, key: str) -> ConfigReader:
        """A reader of the object under `key`, of an empty one where it is missing or null."""
        inner = self.config.get(key)
        if not isinstance(inner, (Mapping, type(None))):
            raise ModelError(f"{self.name}: {key} must be an object")
        return ConfigReader(inner or {}, f"{self.name}: {key}", self.source)

    def error(self, text: str) -> ModelError:
        """A ModelError that begins with the config's name."""
        return ModelError(f"{self.name}: {text}")

    def strings(self, key: str, length: int, allowed: Sequence[str]) -> list[str] | None:
        """The list of `length` strings under `key`, each one of `allowed`; None where the key is missing or null."""
        value = self._look_up((key,))
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            size = f"a list of {len(value)}" if isinstance(value, list) else _shown(value)
            raise ModelError(f"{self.name}: {key} is {size}: must be a list of {length}, one for each layer")
        for item in value:
            if item not in allowed:
                raise ModelError(f"{self.name}: {key} holds {_shown(item)}: not one of {', '.join(allowed)}")
        return value

    def flags(self, key: str, length: int) -> list[bool]:
        """The list of `length` zeros and ones under `key`, as booleans."""
        value = self._look_up((key,))
        if not isinstance(value, list) or len(value) != length or any(flag not in (0, 1) for flag in value):
            raise ModelError(f"{self.name}: {key} must be a list of {length} zeros and ones")
        return [bool(flag) for flag in value]

    def integers(self, key: str, *, least: int = 0, most: int) -> list[int]:
        """The list of integers from `least` to `most` under `key`, none where it is missing or null."""
        value = self._look_up((key,))
        if value is None:
            return []
        if not isinstance(value, list) or any(
            isinstance(item, bool) or not isinstance(item, int) or not least <= item <= most for item in value
        ):
            raise self._bad(key, value, f"must be a list of integers from {least} to {most}")
        return value

    def items(self, key: str) -> list[object]:
        """What stands in the list under `key`, unchecked; the value itself where it is no list; nothing where null."""
        value = self._look_up((key,))
        return [] if value is None else [*value] if isinstance(value, list) else [str(value)]

    def integer(self, *keys: str, least: int = 1, most: int = MAX_INTEGER) -> int:
        """The integer under one of `keys`. Raises ModelError where it is missing, no integer or out of range."""
        value = self.optional_integer(*keys, least=least, most=most)
        if value is None:
            raise self._missing(keys[0])
        return value

    def optional_integer(self, *keys: str, least: int = 1, most: int = MAX_INTEGER) -> int | None:
        """As `integer`, but None where the key is missing or null."""
        value = self._look_up(keys)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._bad(keys[0], value, "must be an integer")
        if value < least:
            raise self._bad(keys[0], value, f"must be at least {least}")
        if value > most:
            raise self._bad(keys[0], value, f"must be at most {most:,}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """The boolean under `key`, or the family's own default where the key is missing or null."""
        value = self._look_up((key,))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._bad(key, value, "must be true or false")
        return value

    def number(self, key: str, default: float) -> float:
        """The number under `key`, above zero, or `default`."""
        value = self._look_up((key,))
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._bad(key, value, "must be a number above zero")
        return float(value)

    def text(self, key: str) -> str:
        """The string under `key`; ModelError where it is missing or no string."""
        value = self._look_up((key,))
        if value is None:
            raise self._missing(key)
        if not isinstance(value, str):
            raise self._bad(key, value, "must be a string")
        return value

    def num_layers(self, *keys: str) -> int:
        """The number of layers, refused where it is absurd."""
        return self.integer(*keys, most=MAX_LAYERS)

    def torch_dtype(self) -> str | None:
        """The config's own dtype in kvcalc's words (fp32, fp16, bf16), or None where it names none.

        Transformers 5 writes `dtype` where older releases wrote `torch_dtype`; "auto" names none.
        """
        value = self._look_up(("torch_dtype", "dtype"))
        if value is None or value == "auto":
            return None
        known = _DTYPES.get(value.removeprefix("torch.")) if isinstance(value, str) else None
        if known is None:
            raise self._bad("torch_dtype", value, f"must be one of {', '.join(_DTYPES)}")
        return known

    def head_dim(self, hidden_size: int | None, num_heads: int) -> int:
        """The explicit `head_dim`, else hidden_size / num_attention_heads, which must come out whole."""
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
        """`num_kv_heads`, refused where it does not divide `num_heads`: groups would be of unequal size."""
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
        """The ModelSpec all readers end with, of every layer's mixers, in order.

        `body` counts the other weights; None where the family's weights are not known. Where it raises ModelError the
        model has no weights, and that reason. `attention`: the first attention module's shape unless given.
        `positions` are the keys under which the longest context stands.
        """
        around, reason = None, f"the weights of model_type {model_type} are not counted"
        found = Body()
        if body is not None:
            try:
                found, reason = body(), ""
                around = found.around
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
            layers=group_layers(_layers(mixers, found)),
            max_position_embeddings=self.optional_integer(*positions),
            torch_dtype=self.torch_dtype(),
            is_encoder=is_encoder,
            encoder_tokens=encoder_tokens,
            has_fixed_encoder=has_fixed_encoder,
            around=around,
            weights_reason=reason or None,
            quantization=self.config.get("quantization_config"),
            expert_dtype=self.config.get("expert_dtype"),
            num_draft_layers=draft if isinstance(draft, int) else None,
            state_dtype=state_dtype if isinstance(state_dtype, str) else None,
            stated={key: self.config[key] for key in STATED.get(model_type, ()) if key in self.config},
        )

    def refuse(self, key: str, why: str) -> None:
        """Raise ModelError where `key` is set: a known switch whose cache this reader does not model."""
        value = self._look_up((key,))
        if value not in (None, False):
            raise self._bad(key, value, why)

    def _look_up(self, keys: tuple[str, ...]) -> object:
        found = [(key, self.config[key]) for key in keys if self.config.get(key) is not None]
        for key, value in found[1:]:
            if value != found[0][1]:
                raise ModelError(f"{self.name}: {found[0][0]} is {_shown(found[0][1])} but {key} is {_shown(value)}")
        return found[0][1] if found else None

    def _missing(self, key: str) -> ModelError:
        if key in self.config:
            return ModelError(f"{self.name}: {key} is null")
        return ModelError(f"{self.name}: {key} is missing", nearest(key, self.config))

    def _bad(self, key: str, value: object, must: str) -> ModelError:
        return ModelError(f"{self.name}: {key} is {_shown(value)}: {must}")


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**_SHOWN:
        return "a number of over 40 digits"
    text = ascii(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."

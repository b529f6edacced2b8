"""Typed access to the metadata of a GGUF file under its architecture's keys, with a check for keys that were not read.

Key names are those in gguf-py/gguf/constants.py and src/llama-arch.cpp of llama.cpp, in the version that
llama-cpp-python 0.3.36 ships.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.errors import ModelError
from kvcalc.model.reader import MAX_INTEGER, MAX_LAYERS, ConfigReader

# Keys of attention and of states that do not change the cache in any architecture: scales, norms, clamps, the
# compression of the query and of the output, and how an indexer computes its queries.
_HARMLESS = frozenset(
    (
        "attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.group_norm_epsilon "
        "attention.group_norm_groups attention.max_alibi_bias attention.clamp_kqv attention.scale "
        "attention.output_scale attention.value_scale attention.temperature_length attention.temperature_scale "
        "attention.relative_buckets_count attention.q_lora_rank attention.rope_pattern attention.causal "
        "attention.indexer.head_count attention.indexer.local_blocks attention.output_group_count "
        "attention.output_lora_rank attention.compress_rope_freq_base ssm.time_step_rank ssm.dt_b_c_rms "
        "rescale_every_n_layers time_mix_extra_dim time_decay_extra_dim kda.safe_gate kda.gate_lower_bound "
        "hash_layer_count embedding_length_per_layer_input "
        "leading_dense_block_count moe_every_n_layers interleave_moe_layer_step n_deepstack_layers "
        "deepstack_mapping hidden_activation"
    ).split()
)
_HARMLESS_STARTS = tuple(
    "rope. expert_ experts_ classifier. hyper_connection. altup. laurel. xielu. vision. attn_res.".split()
)

# Parts of names of other keys that may change what a layer keeps, or how many layers there are.
_CACHE_STARTS = ("attention.", "ssm.", "kda.", "wkv.", "shortconv.", "ple.", "hrm.")
_CACHE_PARTS = (
    "window block_count layer kv_ _kv cache head state loop cycle compress sparse recurrent index interval share chunk "
    "swa lora_rank"
).split()


class Facts:
    """The metadata of one architecture. Every key that is looked up counts as read (see `refuse_unread`).

    All look-ups raise ModelError (exit 3) for a value that is missing, not a number or out of range.
    """

    def __init__(self, metadata: Mapping[str, object], arch: str, name: str) -> None:
        self.metadata, self.arch, self.name = metadata, arch, name
        self._reader = ConfigReader(metadata, name, name)
        self.read: set[str] = set()
        self.num_blocks = self.integer("block_count", most=MAX_LAYERS)
        ahead = self.optional("nextn_predict_layers") or 0
        if ahead >= self.num_blocks:
            raise self.error(f"{arch}.nextn_predict_layers is {ahead} of {self.num_blocks} layers")
        # The layers for multi-token prediction come after the layers of the model itself.
        self.num_layers = self.num_blocks - ahead

    def error(self, text: str) -> ModelError:
        return self._reader.error(text)

    def get(self, key: str) -> object:
        """Return the unchecked value under `key`, or None if it is missing."""
        self.read.add(key)
        return self.metadata.get(f"{self.arch}.{key}")

    def optional(self, key: str, *, least: int = 0, most: int = MAX_INTEGER) -> int | None:
        """Return an integer, or None if it is missing."""
        self.read.add(key)
        return self._reader.optional_integer(f"{self.arch}.{key}", least=least, most=most)

    def integer(self, key: str, *, least: int = 1, most: int = MAX_INTEGER) -> int:
        """Return a required integer."""
        value = self.optional(key, least=least, most=most)
        if value is None:
            raise self.missing(key)
        return value

    def by_layer(self, key: str, default: int | None = None) -> list[int]:
        """Return one integer per layer of the model, from a list or from one number for all layers."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return [default] * self.num_layers
        if not isinstance(value, list):
            return [self.integer(key, least=0)] * self.num_layers
        self._check_length(key, len(value))
        return self._reader.integers(f"{self.arch}.{key}", most=MAX_INTEGER)[: self.num_layers]

    def same_in_all(self, key: str, default: int | None = None) -> int:
        """Return the integer that is the same in all layers."""
        by_layer = self.by_layer(key, default)
        if len(set(by_layer)) > 1:
            raise self.error(f"{self.arch}.{key} differs between layers: not supported for this architecture")
        if by_layer[0] < 1:
            raise self.error(f"{self.arch}.{key} is {by_layer[0]}: must be at least 1")
        return by_layer[0]

    def flags(self, key: str) -> list[bool] | int | None:
        """Return one boolean per layer, or the step of a pattern, or None if the key is missing."""
        value = self.get(key)
        if not isinstance(value, list):
            return self.optional(key, most=MAX_LAYERS)
        self._check_length(key, len(value))
        if any(flag not in (0, 1) for flag in value):
            raise self.error(f"{self.arch}.{key} must be a list of true or false for every layer")
        return [bool(flag) for flag in value[: self.num_layers]]

    def number(self, key: str, default: float) -> float:
        """Return a positive number, or `default` if it is missing."""
        self.read.add(key)
        return self._reader.number(f"{self.arch}.{key}", default)

    def boolean(self, key: str, default: bool) -> bool:
        self.read.add(key)
        return self._reader.boolean(f"{self.arch}.{key}", default)

    def refuse_unread(self) -> None:
        """Raise ModelError for a non-empty key that was not read and whose name suggests that it changes the cache."""
        start = f"{self.arch}."
        for full, value in self.metadata.items():
            key = full.removeprefix(start)
            if key == full or key in self.read or key in _HARMLESS or key.startswith(_HARMLESS_STARTS):
                continue
            nothing = value in (None, False, 0, "") or (isinstance(value, list) and not any(value))
            if not nothing and (key.startswith(_CACHE_STARTS) or any(part in key for part in _CACHE_PARTS)):
                raise ModelError(
                    f"{self.name}: {full[:100]!a} may change the cache, and kvcalc does not know it for architecture "
                    f"{self.arch}",
                    "for an upper bound, add --assume-full-attention",
                )

    def missing(self, key: str) -> ModelError:
        return self.error(f"{self.arch}.{key} is missing")

    def _check_length(self, key: str, length: int) -> None:
        # A list may include or omit the layers for multi-token prediction.
        if length not in (self.num_layers, self.num_blocks):
            raise self.error(
                f"{self.arch}.{key} is a list of {length}: must be a list of {self.num_blocks}, one per layer"
            )

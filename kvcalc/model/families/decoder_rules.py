"""What sets one plain decoder family apart from another: defaults of keys its published configs leave out, and which
layers have a window.

Read from the configuration classes of Transformers 5.23.0, whose saved configs hold only what differs from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvcalc.model.reader import ConfigReader

_NOTHING: Mapping[str, object] = {}
_NONE_REFUSED: Mapping[str, str] = {}


class Rule(NamedTuple):
    """A family's own facts.

    `windows`: none (a window is an error), all (every layer, where there is one), switched (by use_sliding_window, then
    `pattern`), or pattern. `pattern`: every so many layers one sees all, the others the window; 0 means that
    max_window_layers is the first with a window. `has_layer_types`: the config may list the kinds itself.
    """

    windows: str = "none"
    pattern: int = 1
    has_layer_types: bool = False
    defaults: Mapping[str, object] = _NOTHING
    refused: Mapping[str, str] = _NONE_REFUSED
    qkv_bias: bool = False
    rotary: bool = True

    def slides(self, number: int, config: ConfigReader) -> bool:
        """Whether layer `number`, from 0, has the window, by the family's pattern."""
        if self.windows == "all" or (self.windows == "switched" and self.pattern == 1):
            return True
        if self.pattern == 0:
            return number >= config.integer("max_window_layers", least=0)
        pattern = config.optional_integer("sliding_window_pattern", "_sliding_window_pattern") or self.pattern
        return (number + 1) % pattern != 0


_BIDIRECTIONAL: Mapping[str, str] = {"use_bidirectional_attention": "an encoder's window is cut in half; not modelled"}
_PLAIN = Rule()


def _kv(num_kv_heads: int, head_dim: int | None = None, **more: object) -> dict[str, object]:
    """Defaults of num_key_value_heads, head_dim and more."""
    return {"num_key_value_heads": num_kv_heads, **({} if head_dim is None else {"head_dim": head_dim}), **more}


# Qwen's window: off unless switched on, and then from max_window_layers on.
_QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28}

RULES: dict[str, Rule] = {
    "generic": Rule("all"),
    "llama": _PLAIN,
    # The original repository's flat config of LLaVA: a LLaMA with keys of the vision tower beside.
    "llava": _PLAIN,
    "mistral": Rule("all", defaults=_kv(8, sliding_window=4096)),
    "mixtral": Rule("all", defaults=_kv(8)),
    "ministral3": Rule("all", defaults=_kv(8, 128)),
    "starcoder2": Rule("all", defaults=_kv(2)),
    "phi3": Rule("all"),
    "phimoe": Rule("all", defaults=_kv(8)),
    "qwen2": Rule("switched", 0, True, _kv(32, **_QWEN_WINDOW), qkv_bias=True),
    # Qwen2 with a layer for the next tokens beside it.
    "mimo": Rule("switched", 0, True, _kv(32, **_QWEN_WINDOW), qkv_bias=True),
    "qwen2_vl_text": Rule("switched", 0, True, _kv(8, sliding_window=4096, max_window_layers=80), qkv_bias=True),
    "qwen2_5_vl_text": Rule("switched", 0, True, _kv(8, sliding_window=4096, max_window_layers=80), qkv_bias=True),
    "qwen3": Rule("switched", 0, True, _kv(32, 128, **_QWEN_WINDOW)),
    # Its layers are not told apart by max_window_layers: switched on, all have the window.
    "qwen3_moe": Rule("switched", 1, False, _kv(4, sliding_window=4096)),
    "qwen3_vl_text": Rule(defaults=_kv(32, 128)),
    "qwen3_vl_moe_text": Rule(defaults=_kv(16)),
    "gemma": Rule(defaults=_kv(16, 256), refused=_BIDIRECTIONAL),
    "gemma2": Rule("pattern", 2, True, _kv(4, 256, sliding_window=4096), _BIDIRECTIONAL),
    # Gemma 3 4B's published config leaves out even the number of heads.
    "gemma3_text": Rule("pattern", 6, True, _kv(4, 256, sliding_window=4096, num_attention_heads=8), _BIDIRECTIONAL),
    "vaultgemma": Rule("pattern", 2, True, _kv(4, 256, sliding_window=4096), _BIDIRECTIONAL),
    "gpt_oss": Rule("pattern", 2, True, _kv(8, 64, sliding_window=128, attention_bias=True)),
    "olmo": _PLAIN,
    "olmo2": _PLAIN,
    "olmoe": _PLAIN,
    "olmo3": Rule("pattern", 4, True, {"sliding_window": 4096}),
    "cohere": _PLAIN,
    "cohere2": Rule("pattern", 4, True, {"sliding_window": 4096}),
    "minimax_m2": Rule(defaults=_kv(8, 128)),
    "glm": Rule(defaults=_kv(2, 128), qkv_bias=True),
    "glm4": Rule(defaults=_kv(2, 128), qkv_bias=True),
    "glm4_moe": Rule(defaults=_kv(8)),
    "granite": _PLAIN,
    "granitemoe": _PLAIN,
    "arcee": _PLAIN,
    "apertus": _PLAIN,
    "helium": Rule(defaults=_kv(20, 128)),
    "seed_oss": Rule(defaults=_kv(8, 128), qkv_bias=True),
    "ernie4_5": Rule(defaults=_kv(2, 128)),
    "hunyuan_v1_dense": _PLAIN,
    "hunyuan_v1_moe": _PLAIN,
    "phi": _PLAIN,
    "stablelm": Rule(defaults=_kv(32)),
    "gpt_neox": Rule(defaults={"attention_bias": True}),
    "bloom": Rule(defaults={"attention_bias": True}, rotary=False),
}  # fmt: skip

"""GGUF metadata as config keys, for architectures whose layers differ, or whose caches are not only K and V.

Every function takes the metadata and the facts that all architectures share (`gguf.config.shared`), and returns the
mapping for the family's reader. It also supplies the values that files leave out and llama.cpp fills in. Source:
load_arch_hparams in src/models of llama.cpp, and conversion/, in the version that llama-cpp-python 0.3.36 ships.
"""

from __future__ import annotations

from typing import Any

from kvcalc.model.gguf.keys import Facts

Config = dict[str, Any]
_KINDS = {True: "sliding_attention", False: "full_attention"}


def sliding(facts: Facts, step: int | None, *, full_first: bool = False) -> list[bool]:
    """Return for each layer whether it has the window: by the file's list, or by a pattern.

    In the pattern, one of every `step` layers has no window: the last one, or the first one if `full_first`. If the
    step is 0, every layer has the window. If `step` is None, the file must state the pattern. Source: load_swa_pattern
    and set_swa_pattern.
    """
    stated = facts.flags("attention.sliding_window_pattern")
    if isinstance(stated, list):
        return stated
    step = step if stated is None else stated
    if step is None:
        raise facts.missing("attention.sliding_window_pattern")
    full = 0 if full_first else step - 1
    return [step == 0 or number % step != full for number in range(facts.num_layers)]


def layer_kinds(flags: list[bool]) -> list[str]:
    """Return layer_types, given whether each layer has the window."""
    return [_KINDS[flag] for flag in flags]


def windows(facts: Facts, step: int | None = None) -> list[str]:
    """Return layer_types, by `sliding`."""
    return layer_kinds(sliding(facts, step))


def count_of(facts: Facts, key: str, kind: str) -> int:
    """Return the number under `key` in the layers of a kind, or in the first layer if there are none of the kind."""
    counts = facts.by_layer(key)
    counts_of_kind = {count for count, own in zip(counts, windows(facts)) if own == kind} or {counts[0]}
    if len(counts_of_kind) > 1:
        raise facts.error(f"{facts.arch}.{key} differs between layers of the same kind")
    return counts_of_kind.pop()


def gemma3n(facts: Facts, config: Config) -> Config:
    """In llama.cpp, the first 20 layers have their own caches, whatever the file states. Both models have 20."""
    own = 20
    shared = facts.optional("attention.shared_kv_layers")
    if facts.num_layers <= own or shared not in (None, facts.num_layers - own):
        raise facts.error(f"gemma3n.attention.shared_kv_layers: only the first {own} layers of this family have caches")
    return {
        **config, "sliding_window": facts.integer("attention.sliding_window"),
        "layer_types": windows(facts, 5), "num_kv_shared_layers": facts.num_layers - own,
    }  # fmt: skip


def gemma4(facts: Facts, config: Config) -> Config:
    """Layers without a cache of their own may have MLPs of twice the width."""
    widths = facts.by_layer("feed_forward_length", 0)
    return {
        **config, "intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] > widths[0],
        "enable_moe_block": bool(facts.optional("expert_count")),
    }  # fmt: skip


def llama4(facts: Facts, config: Config) -> Config:
    """Three of four layers have chunks of 8,192 tokens, a value built into llama.cpp. A window of 0 means no chunks."""
    widths = {"intermediate_size_mlp": "feed_forward_length", "intermediate_size": "expert_feed_forward_length"}
    config = {**config, **{key: facts.optional(stated) for key, stated in widths.items() if facts.get(stated)}}
    stated = facts.optional("attention.sliding_window")
    if stated == 0:
        return {**config, "attention_chunk_size": None, "layer_types": ["full_attention"] * facts.num_layers}
    if stated not in (None, 8192):
        raise facts.error(f"llama4.attention.sliding_window is {stated}: this family has chunks of 8,192 tokens")
    kinds = ["chunked_attention" if chunked else "full_attention" for chunked in sliding(facts, 4)]
    return {**config, "attention_chunk_size": 8192, "layer_types": kinds}


def deci(facts: Facts, config: Config) -> Config:
    """A layer without KV heads has no attention, or a linear layer instead of it. A layer of width 0 has no MLP."""
    heads = facts.by_layer("attention.head_count")
    kept = facts.by_layer("attention.head_count_kv")
    most = max(heads)
    blocks: list[Config] = []
    for count, kv, inner in zip(heads, kept, facts.by_layer("feed_forward_length", 0)):
        if kv and (count != most or count % kv):
            raise facts.error("deci.attention.head_count differs between attention layers")
        attention = {"n_heads_in_group": count // kv} if kv else {"replace_with_linear" if count else "no_op": True}
        blocks.append({"attention": attention, "ffn": {"intermediate_size": inner} if inner else {"no_op": True}})
    del config["num_key_value_heads"]
    return {**config, "num_attention_heads": most, "block_configs": blocks}


def attending(facts: Facts) -> tuple[int, list[bool]]:
    """Return the number of KV heads of the attention layers, and for each layer whether it is one.

    Attention layers are those with KV heads. All of them must have the same number.
    """
    heads = facts.by_layer("attention.head_count_kv")
    kept = {count for count in heads if count}
    if len(kept) > 1:
        raise facts.error(f"{facts.arch}.attention.head_count_kv differs between attention layers")
    if not kept:
        raise facts.error(f"{facts.arch}.attention.head_count_kv is 0 in every layer")
    return kept.pop(), [count > 0 for count in heads]


def state_size(facts: Facts, name: str) -> int:
    """A size of a Mamba-2 mixer or a delta net by its name in `Mamba2`."""
    number: int = getattr(Mamba2(facts), name)
    return number


class Mamba2:
    """The sizes of a Mamba-2 mixer, or of a delta net, which uses the same keys."""

    def __init__(self, facts: Facts) -> None:
        self.inner = facts.integer("ssm.inner_size")
        self.heads = facts.integer("ssm.time_step_rank")
        self.state = facts.integer("ssm.state_size")
        self.groups = facts.integer("ssm.group_count")
        self.kernel = facts.integer("ssm.conv_kernel")
        if self.inner % self.heads:
            raise facts.error(f"{facts.arch}.ssm.time_step_rank {self.heads} does not divide inner_size {self.inner}")
        self.head_dim = self.inner // self.heads


def jamba(facts: Facts, config: Config) -> Config:
    """The attention layers must be evenly spaced, because Jamba's config states only a period and an offset."""
    heads, attends = attending(facts)
    layers = [number for number, attending in enumerate(attends) if attending]
    period = layers[1] - layers[0] if len(layers) > 1 else facts.num_layers
    offset = layers[0] % period
    if [number % period == offset for number in range(facts.num_layers)] != attends:
        raise facts.error("jamba.attention.head_count_kv: unevenly spaced attention layers are not supported")
    return {
        **config, "num_key_value_heads": heads, "attn_layer_period": period, "attn_layer_offset": offset,
        "mamba_d_state": facts.integer("ssm.state_size"), "mamba_d_conv": facts.integer("ssm.conv_kernel"),
        "mamba_expand": facts.integer("ssm.inner_size") / config["hidden_size"],
    }  # fmt: skip


def nemotron_h(facts: Facts, config: Config) -> Config:
    """A layer without KV heads is a Mamba-2 layer if it has no feed-forward width either, else an MLP or experts."""
    heads, attends = attending(facts)
    widths = facts.by_layer("feed_forward_length")
    other = "E" if facts.arch.endswith("_moe") else "-"
    letters = ["*" if attending else other if width else "M" for attending, width in zip(attends, widths)]
    mixer = Mamba2(facts)
    return {
        **config, "num_key_value_heads": heads, "hybrid_override_pattern": "".join(letters),
        "ssm_state_size": mixer.state, "mamba_num_heads": mixer.heads, "mamba_head_dim": mixer.head_dim,
        "n_groups": mixer.groups, "conv_kernel": mixer.kernel,
    }  # fmt: skip


def layer_types_of_states(facts: Facts, interval: int) -> list[str]:
    """Return the kind of every layer: by the file's list, else attention in every `full_attention_interval`-th layer.

    All other layers keep a state. `interval` is the default if the file does not state one.
    """
    listed = facts.flags("attention.recurrent_layers")
    interval = facts.optional("full_attention_interval", least=1) or interval
    if not isinstance(listed, list):
        listed = [(n + 1) % interval != 0 if listed is None else listed > 0 for n in range(facts.num_layers)]
    return ["linear_attention" if recurrent else "full_attention" for recurrent in listed]

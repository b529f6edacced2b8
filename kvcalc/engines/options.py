"""The options each engine takes, under the engine's own names. Loading this module loads no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from kvcalc.errors import UsageError, nearest
from kvcalc.records import NamedTuple
from kvcalc.units import parse_count

NO_ENGINE = "logical"
"""What stands for the formulas alone, in place of an engine. The default of most questions."""


class Option(NamedTuple):
    """One option of an engine.

    `metavar` is None for a flag. `default` describes what the engine does without the option. `divides_memory` is true
    if the option divides a device's memory, so that it needs a device.
    """

    name: str
    metavar: str | None
    help: str
    default: str | None = None
    aliases: tuple[str, ...] = ()
    divides_memory: bool = False

    @property
    def described(self) -> str:
        """The help and the default, as sentences."""
        return f"{self.help}." + (f" Default: {self.default}." if self.default else "")


OPTIONS: dict[str, tuple[Option, ...]] = {
    "logical": (),
    "transformers": (Option("cache", "dynamic|static", "class of the cache", "dynamic"),),
    "vllm": (
        Option("block-size", "N", "tokens per block", "16"),
        Option("max-num-batched-tokens", "N", "tokens in one step", "8192, or the device's default with a device"),
        Option("no-async-scheduling", None, "run one step at a time instead of two"),
        Option("enable-prefix-caching", None, "cache prefixes even if vLLM does not by default"),
        Option("no-enable-prefix-caching", None, "do not cache prefixes, which takes fewer recurrent states"),
        Option(
            "gdn-prefill-backend",
            "flashinfer|triton|cutedsl",
            "prefill kernel of Qwen's gated delta nets; flashinfer keeps one more state with prefix caching",
            "flashinfer, or triton on devices that FlashInfer does not support",
        ),
        Option(
            "decode-context-parallel-size",
            "N",
            "devices of --tp that divide the tokens of the cache among them",
            "1",
            ("-dcp",),
        ),
        Option(
            "prefill-context-parallel-size",
            "N",
            "copies of an MLA model's attention that divide the tokens of a prompt; each is on --tp devices and keeps "
            "the cache of all requests",
            "1",
            ("-pcp",),
        ),
        Option(
            "pp-layer-partition",
            "N,N",
            "layers of each pipeline stage, as in VLLM_PP_LAYER_PARTITION",
            "as even as possible, with one layer more in the stages before the last one",
        ),
        Option("disable-hybrid-kv-cache-manager", None, "keep all tokens in layers with a window if others keep them"),
        Option(
            "mamba-cache-mode",
            "align|all|none",
            "states that prefix caching keeps; all is a state for every block, before 0.32",
            "the release's",
        ),
        Option("mamba-block-size", "N", "tokens per state in mode all", "the chunk of the model's kernel"),
        Option(
            "mamba-cache-dtype",
            "auto|float32|float16|bfloat16",
            "type of recurrent states and of the inputs of convolutions",
            "auto",
        ),
        Option("mamba-ssm-cache-dtype", "auto|float32|float16|bfloat16", "type of recurrent states alone", "auto"),
        Option(
            "kv-cache-dtype-skip-layers",
            "N,N",
            "layers that keep the model's type, by number, and sliding_window for all with a window",
        ),
        Option("num-speculative-tokens", "N", "draft tokens per step"),
        Option(
            "gpu-memory-utilization",
            "F",
            "share of a device's memory that vLLM takes",
            "0.92, or 0.9 before 0.21",
            divides_memory=True,
        ),
        Option("max-num-seqs", "N", "maximum running requests", "the device's default", divides_memory=True),
        Option("enforce-eager", None, "use no CUDA graphs", divides_memory=True),
        Option("language-model-only", None, "load no vision or audio tower of a multimodal model", divides_memory=True),
        Option(
            "max-loras",
            "N",
            "LoRA adapters in one batch, with --max-lora-rank; a model with either has buffers for them",
            "1",
            divides_memory=True,
        ),
        Option("max-lora-rank", "R", "largest rank of a LoRA adapter", "16", divides_memory=True),
    ),
    "sglang": (
        Option("page-size", "N", "tokens per page", "1, or 64 with an indexer"),
        Option("swa-full-tokens-ratio", "R", "size of the sliding-window pool relative to the full pool", "0.8"),
        Option(
            "max-running-requests", "N", "maximum running requests; the request table is counted only with this option"
        ),
        Option("context-length", "N", "width of the request table", "the model's"),
        Option("max-mamba-cache-size", "N", "recurrent states", "as many as the sequences need"),
        Option("mamba-full-memory-ratio", "R", "memory of the states relative to that of the tokens", "0.9"),
        Option("disable-radix-cache", None, "cache no prefixes, which takes one recurrent state per sequence"),
        Option("speculative-num-draft-tokens", "N", "tokens that a step checks; each has a recurrent state"),
        Option("speculative-eagle-topk", "N", "branches of a tree of drafts", "1"),
        Option("chunked-prefill-size", "N", "tokens in one step of a prompt", "8192, or the device's default"),
        Option(
            "attn-cp-size",
            "N",
            "copies of the attention that divide the tokens of a prompt (--enable-prefill-cp); each is on --tp devices "
            "and keeps the cache of all requests",
            "1",
        ),
        Option(
            "mem-fraction-static",
            "F",
            "share of the memory for the weights and the pool",
            "the device's default",
            divides_memory=True,
        ),
        Option(
            "max-loras-per-batch",
            "N",
            "LoRA adapters in one batch, with --max-lora-rank",
            "8",
            divides_memory=True,
        ),
        Option("max-lora-rank", "R", "largest rank of a LoRA adapter", "16", divides_memory=True),
    ),
    "tensorrt-llm": (
        Option("tokens-per-block", "N", "tokens per block", "32"),
        Option("max-tokens", "N", "tokens in the pool, regardless of the memory"),
        Option("free-gpu-memory-fraction", "F", "the pool's share of the free memory, or of --kv-memory"),
        Option("max-attention-window", "W,W", "windows of the layers, repeated in turn: 128,32k"),
        Option("max-batch-size", "N", "maximum running requests, for which a hybrid model has states", "the batch"),
        Option(
            "avg-seq-len",
            "N",
            "tokens of the requests for which the pools of windows, or of states, divide the memory",
            "2048, or with states half of the model's longest context",
        ),
    ),
    "llama.cpp": (
        Option("cache-type-k", "TYPE", "type of K", "f16", ("-ctk",)),
        Option("cache-type-v", "TYPE", "type of V", "f16", ("-ctv",)),
        Option(
            "parallel",
            "N",
            "number of slots, if more than --batch; maximum running requests",
            "4 with --kv-unified, or --batch if that is more",
            ("-np",),
        ),
        Option("kv-unified", None, "all slots share one stream, and so the context", None, ("-kvu",)),
        Option("ubatch-size", "N", "tokens in one step", "512", ("-ub",)),
        Option("draft-max", "N", "drafted tokens per step, for each of which a recurrent state is kept"),
        Option("swa-full", None, "keep all tokens in sliding-window layers"),
        Option("flash-attn", "on|off|auto", "flash attention; off pads V", "auto", ("-fa",)),
        Option(
            "tensor-split",
            "N,N",
            "share of the layers on each device: 3,1",
            "the free memory of each",
            ("-ts",),
        ),
        Option("split-mode", "none|layer|row", "how several devices divide the model", "layer", ("-sm",)),
        Option("before-pull", "N", "a build older than this pull request: 24216, 19067, 16736, 16812, 13194 or 12801"),
        Option(
            "fit-target",
            "MIB",
            "memory that --context auto leaves free on every device, in MiB",
            "1024",
            ("-fitt",),
            divides_memory=True,
        ),
        Option(
            "fit-ctx", "N", "the shortest context that --context auto chooses", "4096", ("-fitc",), divides_memory=True
        ),
        Option(
            "n-gpu-layers",
            "N|auto|all",
            "layers on the device, counted from the last; the output is one of them. auto is as many as fit",
            "all",
            ("-ngl", "--gpu-layers"),
            divides_memory=True,
        ),
        Option(
            "n-cpu-moe",
            "N",
            "keep the experts of the first N layers in host memory",
            None,
            ("-ncmoe",),
            divides_memory=True,
        ),
        Option("cpu-moe", None, "keep all experts in host memory", None, ("-cmoe",), divides_memory=True),
        Option("no-kv-offload", None, "keep the whole cache in host memory", None, ("-nkvo",), divides_memory=True),
        Option(
            "host-memory", "SIZE", "memory of the host, for the parts of the model that are there", divides_memory=True
        ),
        Option(
            "host-bandwidth",
            "RATE",
            "theoretical bandwidth of the host's memory",
            "89.6GB/s, two channels of DDR5-5600",
            divides_memory=True,
        ),
    ),
    "mlx": (
        Option("kv-bits", "N", "bits of a quantized cache: 2, 3, 4, 5, 6 or 8", "not quantized"),
        Option("kv-group-size", "N", "elements that share a scale in a quantized cache: 32, 64 or 128", "64"),
        Option("max-kv-size", "N", "tokens that the cache keeps, in models whose class does not decide this itself"),
        Option("prefill-step-size", "N", "tokens in one step of a prompt", "2048", divides_memory=True),
    ),
}
"""Engine name -> its options."""


@cache
def option_names() -> tuple[str, ...]:
    """The name of every option of every engine, once."""
    return tuple(dict.fromkeys(option.name for options in OPTIONS.values() for option in options))


def engines_with(name: str) -> list[str]:
    """The engines that take the option called `name`."""
    return [engine for engine, options in OPTIONS.items() if any(option.name == name for option in options)]


def check_settings(engines: Iterable[str], settings: Mapping[str, Any], has_device: bool) -> None:
    """Raise UsageError (exit 2) if none of the engines takes a setting, or if it needs a device and there is none.

    `engines` are names, which may end in a release; `settings` maps option name to text.
    """
    names = [engine.partition("@")[0] for engine in engines]
    taken = {option.name: option for name in names for option in OPTIONS.get(name, ())}
    for name in settings:
        if name not in taken:
            owners = engines_with(name)
            raise UsageError(
                f"--{name}: {', '.join(dict.fromkeys(names))} has no such setting",
                f"--{name} belongs to {', '.join(owners)}" if owners else nearest(name, taken),
            )
        if taken[name].divides_memory and not has_device:
            raise UsageError(f"--{name} divides a device's memory and needs a device", "for example --gpu h100")


def settings_of(engine: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `engine` takes."""
    taken = {option.name for option in OPTIONS.get(engine.partition("@")[0], ())}
    return {name: text for name, text in settings.items() if name in taken}


class Given(NamedTuple):
    """An engine's settings, option name to text, and methods that parse them.

    A setting that is not given has the value `otherwise`, or else the default that its option declares. Every method
    raises UsageError (exit 2) for text that it cannot parse.
    """

    engine: str
    settings: Mapping[str, str]

    def count(self, name: str, otherwise: int | None = None) -> int:
        """A whole number of at least 1."""
        if otherwise is not None and name not in self.settings:
            return otherwise
        return parse_count(self._text(name), f"--{name}")

    def optional_count(self, name: str) -> int | None:
        """A whole number of at least 1, or None if it is not given."""
        return self.count(name) if name in self.settings else None

    def choice(self, name: str, what: str = "a choice") -> str:
        """One of the words in the option's metavar. `what` names it in the error."""
        text, known = self._text(name), (self._option(name).metavar or "").split("|")
        if text not in known:
            raise UsageError(f"--{name} {text!r}: not {what}", f"one of {', '.join(known)}")
        return text

    def share(self, name: str, otherwise: float | None = None, *, below_one: bool = False) -> float:
        """A number above 0 and at most 1, or below 1 with `below_one`."""
        if otherwise is not None and name not in self.settings:
            return otherwise
        text = self._text(name)
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= 1 or (below_one and value == 1):
            hint = None if otherwise is None else f"the default is {otherwise:g}"
            most = "below" if below_one else "at most"
            raise UsageError(f"--{name} {text[:40]!a}: must be above 0 and {most} 1", hint)
        return value

    def ratio(self, name: str) -> float:
        """A number above 0 and below 1e9."""
        text = self._text(name)
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < 1e9:
            hint = f"the default is {self._option(name).default}"
            raise UsageError(f"--{name} {text[:40]!a}: must be a number above 0 and below 1e9", hint)
        return value

    def _text(self, name: str) -> str:
        return self.settings[name] if name in self.settings else self._option(name).default or ""

    def _option(self, name: str) -> Option:
        return next(option for option in OPTIONS[self.engine] if option.name == name)

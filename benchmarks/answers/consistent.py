"""What the options of a random question need besides, or exclude."""

from __future__ import annotations

from typing import Any

from benchmarks.answers.values import FOR_PROMPTS, IN_HOST_MEMORY, NEEDS_DEVICE, WITH_MTP


def keep_consistent(asking: Any) -> None:
    """Change the options so that most questions are answered. A few contradictions stay, whose refusals are recorded.

    `asking` is a `generator.Asking`.
    """
    if asking.random.random() < 0.03:
        return
    options = asking.options
    if "gpu" not in options:
        for name in ("input-tokens", "output-tokens", "concurrency", "prefix-hit-rate", "ep", *NEEDS_DEVICE):
            options.pop(name, None)
    elif asking.command != "plan":
        _fit_layout(asking)
    _fit_drafts(asking)
    if IN_HOST_MEMORY & {*options} and "gpu" in options and asking.command != "plan":
        options["gpu"] = f"{options['gpu'].rpartition('x')[0]}x1"
        for name in ("tensor-split", "split-mode", "pp"):
            options.pop(name, None)
    if asking.command == "plan":
        options.pop("tensor-split", None)
    if asking.name in ("logical", "mlx") and options.get("context") == "auto":
        options["context"] = "4096"
    if asking.name == "transformers":
        for name in ("prefix-tokens", "prefix-hit-rate", "turns"):
            options.pop(name, None)
    if "image-size" in options:
        options["image-size"] = "640x480"
    if "cpu-moe" in options:
        options.pop("n-cpu-moe", None)
    if "cache-type-k" in options or "cache-type-v" in options:
        options.pop("kv-dtype", None)
    prompt = options.get("input-tokens", options.get("prompt-tokens", options.get("context", "1100")))
    if prompt.isdecimal() and int(options.get("prefix-tokens", "0")) >= int(prompt):
        options["prefix-tokens"] = str(int(prompt) // 2)


def _fit_layout(asking: Any) -> None:
    """A number of devices that divides the heads, and sizes that the other options need."""
    options = asking.options
    models: list[dict[str, Any]] = asking.declared.models
    facts = next((model for model in models if model["name"] == asking.model), {})
    gpu, _, number = options["gpu"].partition(",")[0].rpartition("x")
    if not number.isdecimal():
        return
    count, heads = int(number), facts.get("num_attention_heads") or 1
    for name in FOR_PROMPTS:
        if options.get(name, "1") != "1" and facts.get("attention") != "mla":
            options[name] = "1"
    if "pp-layer-partition" in options:
        layers = facts.get("num_layers", 32)
        options["pp-layer-partition"] = f"{layers // 2},{layers - layers // 2}"
        options.update({"pp": "2", "tp": "1", "gpu": f"{gpu}x2"})
        for name in ("dp", "ep"):
            options.pop(name, None)
    elif options.get("decode-context-parallel-size") == "2":
        options["tp"] = str(count)
        for name in ("pp", "dp"):
            options.pop(name, None)
    elif any(options.get(name) == "2" for name in FOR_PROMPTS):
        options["tp"] = str(max(1, count // 2))
        for name in ("pp", "dp", "speculative", "acceptance-length", "draft-model"):
            options.pop(name, None)
    elif not {"tp", "pp", "dp"} & {*options} and heads % count and asking.name not in ("llama.cpp", "mlx"):
        options["gpu"] = f"{gpu}x1"
        options.pop("ep", None)
    if "tensor-split" in options:
        options["tensor-split"] = ",".join(asking.random.choice(("1", "3")) for _ in range(count))
        if count > 1:
            for name in IN_HOST_MEMORY:
                options.pop(name, None)


def _fit_drafts(asking: Any) -> None:
    """Leave out drafts that the engine or the model does not have."""
    options = asking.options
    method = options.get("speculative", "").partition(":")[0]
    if asking.model not in WITH_MTP:
        options.pop("num-speculative-tokens", None)
    if not method:
        options.pop("speculative-eagle-topk", None)
        options.pop("speculative-num-draft-tokens", None)
        return
    options.pop("pp", None)
    can = {"transformers": ("draft", "ngram"), "mlx": ("draft",), "llama.cpp": ("draft", "mtp", "ngram"), "logical": ()}
    if method not in can.get(asking.name, (method,)):
        for name in ("speculative", "acceptance-length", "draft-model"):
            options.pop(name, None)
    elif "num-speculative-tokens" in options:
        options["num-speculative-tokens"] = options["speculative"].partition(":")[2]

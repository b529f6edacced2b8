"""The checkpoints that a printed command loads, of the model and of drafts: placeholders if they have no known name."""

from __future__ import annotations

import os

from kvcalc.engines.command import Checkpoint, Drafting
from kvcalc.errors import KvcalcError
from kvcalc.memory.dtypes import parse_dtype, parse_weight_dtype
from kvcalc.model.drafting import EAGLE, EAGLE1, MTP, Speculation, reads_cache
from kvcalc.model.files import expanded
from kvcalc.model.memo import remembered
from kvcalc.model.presets import Preset, find_preset, names_of
from kvcalc.model.resolve import find_published
from kvcalc.model.spec import ModelSpec
from kvcalc.server.weights import describe_weights

YOURS = "<your checkpoint>"
_YOUR_HEAD = "<your EAGLE head>"

_HUB = "https://huggingface.co/"
_CONFIGS = (".json", ".yaml", ".yml")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Types with 16 or 32 bits. Engines convert a checkpoint from one to another while loading it.
_FLOATS = ("bf16", "fp16", "fp32")
# The types to which vLLM 0.33.0 and SGLang 0.5.23 can convert a 16-bit checkpoint while loading it (--quantization).
# Both need memory for the unconverted checkpoint, so no printed command does this.
_MADE_WHILE_LOADING = ("fp8",)


def checkpoint_of(spec: ModelSpec, dtype: str | None = None) -> Checkpoint:
    """The checkpoint of the model as it was asked for (`spec.reference`), with weights of type `dtype`.

    `dtype` is None for the checkpoint's own type. If engines cannot convert the weights to `dtype` while loading,
    another checkpoint is needed. Its name is not known, so a placeholder is returned. Raises UsageError (exit 2) for an
    unknown type.
    """
    named = _named(spec)
    scheme = parse_weight_dtype(dtype)
    if scheme is None or named.name == YOURS:
        return named
    model_dtype = parse_dtype(spec.torch_dtype or "bf16", "torch_dtype")
    stored = describe_weights(spec, spec, None, model_dtype, [])["dtype"]
    if scheme.name in _FLOATS and stored in _FLOATS:
        return named._replace(dtype=scheme.name)
    if scheme.name == stored:
        return named
    note = f"the commands name no checkpoint: the weights of {named.name} are {stored or 'of another type'}, and "
    note += f"--dtype {scheme.name} needs weights of that type"
    if scheme.name in _MADE_WHILE_LOADING and stored in _FLOATS:
        note += f"; --quantization {scheme.name} converts them while loading, if they fit unconverted"
    return Checkpoint(f"<your {scheme.name} checkpoint>", note=note)


def drafting_of(speculation: Speculation | None) -> Drafting | None:
    """How a printed command drafts tokens. None if it does not."""
    if speculation is None:
        return None
    head = _YOUR_HEAD if speculation.method in (EAGLE, EAGLE1) else None
    name = head if speculation.draft_model is None else checkpoint_of(speculation.draft_model).name
    # A checkpoint that reads the model's cache has its MTP layers.
    is_mtp = speculation.draft_model is not None and reads_cache(speculation.draft_model)
    return Drafting(MTP if is_mtp else speculation.method, speculation.num_tokens, name)


def _named(spec: ModelSpec) -> Checkpoint:
    """The checkpoint, regardless of the type of its weights."""
    typed = spec.reference
    if typed == "-":
        return _unnamed("the config came from stdin")
    if spec.gguf is not None:
        return Checkpoint(_path(typed or spec.source))
    if spec.checkpoint is not None:
        if _holds_weights(spec.checkpoint):
            return Checkpoint(_path(spec.checkpoint))
        return _unnamed(f"there are no weights next to {os.path.join(spec.checkpoint, 'config.json')}")
    if typed.startswith("hf:"):
        name, _, revision = typed.removeprefix("hf:").partition("@")
        return Checkpoint(name, revision or None)
    repository = _repository(spec)
    return (
        _unnamed(f"{typed or spec.name} is not the name of a repository")
        if repository is None
        else Checkpoint(repository)
    )


def _path(path: str) -> str:
    """A path that is no option and no other word of a command."""
    return path if "/" in path and not path.startswith("-") else os.path.join(os.curdir, path)


def _unnamed(reason: str) -> Checkpoint:
    return Checkpoint(YOURS, note=f"the commands name no checkpoint: {reason}")


def _holds_weights(folder: str) -> bool:
    try:
        return any(name.endswith(_WEIGHTS) and not name.startswith("adapter") for name in os.listdir(folder))
    except OSError:
        return False


@remembered
def _repository(spec: ModelSpec) -> str | None:
    """The repository on the Hub that was asked for, or None.

    Several repositories may share a preset. If an alias was typed, with or without the organization, it is that
    repository. If the preset's own name was typed, it is the repository that the config was read from.
    """
    typed = spec.reference
    preset = _preset_of(spec)
    if preset is not None:
        listed = [alias for alias in preset.aliases if "/" in alias]
        wanted = typed.casefold()
        same = [alias for alias in listed if wanted in (alias.casefold(), alias.casefold().rpartition("/")[2])]
        if same:
            return same[0]
        if not typed or wanted in names_of(preset):
            return _of_same_weights(spec, [*filter(None, [_on_hub(spec.source)]), *listed])
    if typed.endswith(_CONFIGS) or not typed:
        return _on_hub(spec.source)
    return typed if typed.count("/") == 1 and not os.path.exists(expanded(typed)) else None


def _of_same_weights(spec: ModelSpec, names: list[str]) -> str | None:
    """The first of a preset's repositories with the preset's own types and context, which some releases change.

    None if all differ. A repository that is not known is taken.
    """

    def facts(of: ModelSpec) -> tuple[object, ...]:
        return of.named_dtype, of.quantization, of.torch_dtype, of.max_position_embeddings

    published = ((name, find_published(name)) for name in names)
    return next((name for name, of in published if of is None or facts(of) == facts(spec)), None)


def _preset_of(spec: ModelSpec) -> Preset | None:
    """The preset the model was read from, or None."""
    for name in (spec.reference, spec.name):
        try:
            preset = find_preset(name) if name else None
        except KvcalcError:
            continue
        if preset is not None and preset.source == spec.source:
            return preset
    return None


def _on_hub(source: str) -> str | None:
    """`org/name` if the source is on the Hugging Face Hub, else None. A remark may follow the address."""
    parts = source.split(" ")[0].removeprefix(_HUB).removeprefix("hf:").partition("@")[0].split("/")
    return "/".join(parts[:2]) if source.startswith((_HUB, "hf:")) and len(parts) >= 2 else None

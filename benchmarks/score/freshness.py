"""Which architectures that the newest engines register kvcalc does not answer.

    python benchmarks/score/freshness.py [WHEEL...]

A WHEEL is a file of vLLM, SGLang or Transformers, as `pip download --no-deps vllm` stores it. Without one, the
installed packages are read. They are read and not imported, so they need no GPU and none of what they depend on.

The architectures that generate text count: vLLM's lists of text and multimodal models, SGLang's entry classes, and the
model types of Transformers that have a class for causal language models or for text from images, sounds or text. An
architecture is answered if `kvcalc estimate --engine ENGINE` gives the bytes of the cache for a config of it: a
preset, or the defaults of its class in Transformers, if that is installed. If there is no config to ask about, it is
answered if its type is read.
"""

from __future__ import annotations

import argparse
import ast
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kvcalc
from kvcalc.errors import KvcalcError
from kvcalc.model.presets import list_presets
from kvcalc.model.type_tables import rows_of

Read = Callable[[str], str]
"""The text of a file of a package, or an empty text."""

ENGINES = ("vllm", "sglang", "transformers")
_VLLM_LISTS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
_AUTO = "transformers/models/auto/modeling_auto.py"
_GENERATING = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)  # fmt: skip
# Classes that are no model of their own, or that generate no text: SGLang registers encoders and rewards with the rest,
# and PI0 gives a robot's movements.
_NO_TEXT = re.compile(
    r"^PI0|Embedding|Reward|SequenceClassification|TokenClassification|ForMaskedLM|NextN|MTP|Eagle|EAGLE|Medusa|DFlash|DSpark"
    r"|^(Bert|Roberta|XLMRoberta|CLIP|Siglip)|Draft|Assistant|Pooling|Classif|ImageModel|VisionModel|Contriever|GlmImage|Bidirectional|TransformersFor|TransformersM"
    r"|Transformers$|TorchNative|MindSpore"
)
_ENDS = re.compile(
    r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|ForImageTextToText|LMModel|ChatModel|ForSpeechSeq2Seq"
    r"|ForTextGeneration|Model|LM|LLM)+$"
)
# Classes whose name is not that of their model type: what vLLM's registry and SGLang's configuration classes name.
_TYPES = {
    "BailingMM2NativeForConditionalGeneration": "bailing_moe_v2",
    "BailingMMNativeForConditionalGeneration": "bailing_moe_v2",
    "BailingMoeV2_5ForCausalLM": "bailing_hybrid",
    "BailingMoeV3ForCausalLM": "bailing_hybrid",
    "ChatGLMForConditionalGeneration": "chatglm",
    "Cosmos3ForConditionalGeneration": "cosmos3_omni",
    "ChatGLMModel": "chatglm",
    "DeepseekOCRForCausalLM": "deepseek_vl_v2",
    "DotsVLMForCausalLM": "dots_vlm",
    "DeepseekVL2ForCausalLM": "deepseek_vl_v2",
    "FireRedASR2ForConditionalGeneration": "qwen2",
    "FunASRForConditionalGeneration": "qwen3",
    "Grok1ForCausalLM": "grok-1",
    "Grok1ModelForCausalLM": "grok-1",
    "HCXVisionV2ForCausalLM": "vlm",
    "HfMoondream": "moondream3",
    "InternS1ProForConditionalGeneration": "interns1_pro",
    "JetVLMForConditionalGeneration": "jet_vlm",
    "KananaVForConditionalGeneration": "kanana-1.5-v",
    "LlavaVidForCausalLM": "llava",
    "KimiK3LinearForCausalLM": "kimi_linear",
    "MiDashengLMModel": "midashenglm",
    "MiMoV2OmniForCausalLM": "mimo_v2",
    "MiniMaxM3SparseForCausalLM": "minimax_m3",
    "MistralLarge3ForCausalLM": "deepseek_v3",
    "MoonshotKimiaForCausalLM": "kimi_audio",
    "MultiModalityCausalLM": "multi_modality",
    "OpenVLAForActionPrediction": "openvla",
    "Phi4ForCausalLMV": "phi3",
    "PixtralForConditionalGeneration": "mistral3",
    "PanguEmbeddedForCausalLM": "PanguEmbedded",
    "OpenPanguVLForConditionalGeneration": "openpangu_vl",
    "QuantMixtralForCausalLM": "mixtral",
    "Qwen3ASRRealtimeGeneration": "qwen3_asr",
    "SkyworkR1VChatModel": "skywork_chat",
    "StepVLForConditionalGeneration": "step_robotics",
    "TeleChat2ForCausalLM": "telechat",
    "TeleFLMForCausalLM": "llama",
    "XverseMoeForCausalLM": "xverse",
    "RForConditionalGeneration": "R",
    "Rnj1ForCausalLM": "gemma3_text",
    "Sarashina2VisionForCausalLM": "sarashina2_vision",
    "VoxtralRealtimeGeneration": "voxtral_realtime_text",
    "YiVLForCausalLM": "llava",
}
# Why these have no type that is read.
_REASONS = {
    "NemotronParseForConditionalGeneration": "its mBART decoder behind a vision encoder is not modelled",
    "RadioMBartPrefixForCausalLM": "its mBART decoder behind a vision encoder is not modelled",
    "PanguProMoEV2ForCausalLM": "no config of it is public",
    "Phi3SmallForCausalLM": "its block-sparse attention is not modelled",
}
_TYPE_FILES = ("wrappers", "decoders", "families")


def main() -> None:
    """Print the share of each engine's architectures that is answered, and those that are not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    packages = _of_wheels(parser.parse_args().wheels) or _installed()
    types: dict[str, list[str]] = {}
    for name, (_, read) in packages:
        types.update(types_of_classes(read) if name == "transformers" else {})
    for engine in ENGINES:
        for version, read in (package for name, package in packages if name == engine):
            classes = sorted(architectures(engine, read))
            problems = {name: problem_of(name, engine, types) for name in classes}
            missing = {name: problem for name, problem in problems.items() if problem is not None}
            answered = len(classes) - len(missing)
            print(f"{engine} {version}: {answered} of {len(classes)} ({answered / max(len(classes), 1):.1%})")
            for name, problem in missing.items():
                print(f"  {name}: {problem}")


def _of_wheels(paths: Iterable[Path]) -> list[tuple[str, tuple[str, Read]]]:
    found = []
    for path in paths:
        name, version = path.name.split("-")[:2]
        found.append((name, (version, _from_wheel(path))))
    return found


def _from_wheel(path: Path) -> Read:
    wheel = zipfile.ZipFile(path)
    names = set(wheel.namelist())

    def read(name: str) -> str:
        if name.endswith("/"):
            return "\n".join(wheel.read(one).decode() for one in sorted(names) if _is_module(one, name))
        return wheel.read(name).decode() if name in names else ""

    return read


def _is_module(name: str, folder: str) -> bool:
    return name.startswith(folder) and name.endswith(".py")


def _installed() -> list[tuple[str, tuple[str, Read]]]:
    from importlib.metadata import version

    found = []
    for package in ENGINES:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            found.append((package, (version(package), _from_folder(Path(spec.origin).parents[1]))))
    return found


def _from_folder(root: Path) -> Read:
    def read(name: str) -> str:
        if name.endswith("/"):
            return "\n".join(path.read_text() for path in sorted((root / name).rglob("*.py")))
        return (root / name).read_text() if (root / name).is_file() else ""

    return read


def architectures(engine: str, read: Read) -> set[str]:
    """The classes that an engine registers for models that generate text."""
    if engine == "vllm":
        names = set(_keys(read("vllm/model_executor/models/registry.py"), _VLLM_LISTS))
    elif engine == "sglang":
        names = set(_entry_classes(read("sglang/srt/models/")))
    else:
        names = {name for _, classes in _pairs(read(_AUTO), _GENERATING) for name in classes}
    return {name for name in names if not _NO_TEXT.search(name)}


def _keys(text: str, names: Iterable[str]) -> Iterator[str]:
    """The keys of the mappings with these names."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            yield from (str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))


def _entry_classes(text: str) -> Iterator[str]:
    for found in re.finditer(r"^EntryClass = (\[[^\]]*\]|\w+)", text, re.MULTILINE):
        yield from re.findall(r"\w+", re.sub(r"#.*", "", found[1]))


def _pairs(text: str, names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """The model types and classes in the ordered mappings with these names."""
    for name in names:
        found = re.search(rf"^{name} = OrderedDict\(\s*\[(.*?)^    \]", text, re.MULTILINE | re.DOTALL)
        for row in re.finditer(r'\(\s*"([\w-]+)",\s*(\([^)]*\)|"\w+"|None)', found[1] if found else ""):
            yield row[1], re.findall(r'"(\w+)"', row[2])


def types_of_classes(read: Read) -> dict[str, list[str]]:
    """The model types of each class that generates text in Transformers."""
    types: dict[str, list[str]] = defaultdict(list)
    for model_type, classes in _pairs(read(_AUTO), _GENERATING):
        for name in classes:
            types[name].append(model_type)
    return types


def problem_of(name: str, engine: str, types: Mapping[str, list[str]]) -> str | None:
    """Why kvcalc does not answer an architecture under an engine, or None if it does."""
    known = [*types.get(name, []), *([_TYPES[name]] if name in _TYPES else [])] or _types_like(name)
    if not known:
        return _REASONS.get(name, "its model type is not known")
    problems = [_problem_of_type(model_type, engine) for model_type in dict.fromkeys(known)]
    return None if None in problems else problems[0]


def _types_like(name: str) -> list[str]:
    """The model types that are read and whose name is the class's, apart from case, separators and ends."""
    wanted = _folded(_ENDS.sub("", name))
    return [known for known in _types_read() if _folded(known) in (wanted, f"{wanted}text", f"{wanted}chat")]


@lru_cache
def _types_read() -> tuple[str, ...]:
    """The model types in the tables of kvcalc."""
    found: dict[str, None] = dict.fromkeys(_presets_by_type())
    for file in _TYPE_FILES:
        for name, row in rows_of(file).items():
            inside = row if isinstance(row, Mapping) else {}
            found[name] = None
            for key in ("types", "remote"):
                if isinstance(inside.get(key), (str, list)):
                    found.update(dict.fromkeys(inside[key].split() if isinstance(inside[key], str) else inside[key]))
            if file == "wrappers":
                found.update(dict.fromkeys(inside))
    return tuple(found)


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


@lru_cache
def _presets_by_type() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for preset in list_presets().presets:
        found[str(preset.config.get("model_type"))].append(preset.config)
    return found


@lru_cache
def _problem_of_type(model_type: str, engine: str) -> str | None:
    inner = str(rows_of("wrappers")["library"].get(model_type))
    configs = [*_presets_by_type().get(model_type, []), *_presets_by_type().get(inner, []), *_defaults(model_type)]
    problems = [_refusal(config, engine) for config in configs]
    return None if None in problems else problems[0] if problems else _unread(model_type)


def _defaults(model_type: str) -> list[dict[str, Any]]:
    """The defaults of the type's class in Transformers, if that is installed."""
    if find_spec("transformers") is None:
        return []
    from transformers import AutoConfig

    try:
        return [AutoConfig.for_model(model_type).to_dict()]
    except Exception:  # a class whose defaults cannot be made, or none
        return []


def _unread(model_type: str) -> str | None:
    """Why a type is not read, or None if it is: then a config without sizes is refused for a missing key."""
    refusal = _refusal({"model_type": model_type}, "logical") or ""
    return refusal if refusal.startswith("model_type") else None


def _refusal(config: Mapping[str, Any], engine: str) -> str | None:
    try:
        kvcalc.estimate(kvcalc.read_config(config, "config", "freshness"), engine=engine, context_tokens=512)
    except KvcalcError as error:
        return error.message.removeprefix("config: ")
    return None


if __name__ == "__main__":
    main()

"""Every model type of Transformers that generates: kvcalc reads its class's defaults, or refuses the type by name.

Needs the extra `oracle`; skipped without it.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc.errors import ModelError
from kvcalc.model.hf_config import read_config
from kvcalc.model.towers import towers_of
from kvcalc.model.type_tables import REFUSED

transformers = pytest.importorskip("transformers", reason="the oracle tests need the extra `oracle`")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

# Types whose class cannot be built from its own defaults: what is missing.
INCOMPLETE = {
    "lfm2_moe": "layer_types is missing",
    "qwen4_exp": "indexer_budget is null",
    "qwen4_exp_text": "indexer_budget is null",
}
_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES",
)


def generating_types() -> list[str]:
    """The types with a class that can generate."""
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for mapping in _MAPPINGS:
        for model_type, names in getattr(modeling_auto, mapping, {}).items():
            for name in names if isinstance(names, (list, tuple)) else [names]:
                model = getattr(transformers, name, None)
                if getattr(model, "can_generate", lambda: False)():
                    found.add(model_type)
    return sorted(found)


def defaults(model_type: str) -> dict[str, Any]:
    config: dict[str, Any] = transformers.AutoConfig.for_model(model_type).to_dict()
    return config


# Types with towers whose parameters are not counted, which `towers_of` says. They encode into codes (Emu3, Mimi,
# Encodec, VibeVoice), are of timm, or belong to models that are rarely served. Granite's class has no default of its
# rate.
TOWERS_NOT_COUNTED = set(
    (
        "dia emu3 granite4_vision idefics inkling_mm_model janus moonshine_streaming moshi musicgen musicgen_melody "
        "nemo_speechlm perception_lm pp_formulanet vibevoice vibevoice_asr"
    ).split()
)


def test_every_type_that_generates_is_read_or_refused_by_name() -> None:
    types, uncounted = generating_types(), set()
    assert len(types) > 300
    for model_type in types:
        try:
            config = defaults(model_type)
        except Exception:
            assert model_type == "gemma4_assistant"  # its class refuses its own defaults
            continue
        if model_type in REFUSED:
            with pytest.raises(ModelError, match=REFUSED[model_type][:20]):
                read_config(config, "x", "x")
        elif model_type in INCOMPLETE:
            with pytest.raises(ModelError, match=INCOMPLETE[model_type]):
                read_config(config, "x", "x")
        else:
            spec = read_config(config, model_type, "x")
            assert spec.num_layers > 0
            if any(tower.parameters is None for tower in towers_of(spec)):
                uncounted.add(model_type)
    assert uncounted == TOWERS_NOT_COUNTED


def test_the_refused_types_are_those_of_transformers() -> None:
    assert set(REFUSED) <= set(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)

"""Model types published with code of their own, which Transformers has no class for.

The formula counts them as any other; what Transformers' cache would hold is not known, and refused.
"""

from __future__ import annotations

# model_type -> module in kvcalc.model.families.
REMOTE_FAMILIES: dict[str, str] = {
    "chatglm": "renamed",
    "deci": "nas",
    # The name SGLang's converted checkpoints of DeepSeek-V4 give the reference code.
    "deepseek_ref": "deepseek_v4",
    "exaone": "renamed",
    "jais": "renamed",
    "minimax_m3": "minimax_m3",
    "nemotron-nas": "nas",
    "openelm": "openelm",
    "qwen": "renamed",
    "step3p7": "step",
    "telechat": "renamed",
    **dict.fromkeys(
        (
            "aquila arctic baichuan bailing_moe deepseek grok-1 internlm internlm2 llava llava_llama llava_mistral "
            "llava_qwen minicpm orion phi3_v phi4 phi4mm xverse"
        ).split(),
        "decoder",
    ),
}

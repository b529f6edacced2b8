"""What llama-server keeps of prompts (--cache-ram, ggml-org/llama.cpp#16391), and its drafts.

A slot keeps and drops the same tokens in the model's context and in that of the drafts, whatever drafts
(common_memory::seq_rm), and --cache-ram saves both (prompt_save, tools/server/server-context.cpp of llama-cpp-python
0.3.36).
"""

from __future__ import annotations

from kvcalc.engines.reuse import CPU, FormulaReuse


class LlamaCppReuse(FormulaReuse):
    """llama.cpp's tiers, drafts and prefixes."""

    tiers = (CPU,)
    keeps_one_copy = False
    draft_option = "draft-max"
    drafts_with_dflash = False

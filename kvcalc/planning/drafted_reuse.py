"""Which prefixes an engine finds again while it drafts tokens.

- vLLM: a hidden state of the last token is needed to draft with MTP or EAGLE layers. Before 0.33, the last block that
  matches is computed again (drop_eagle_block of find_longest_cache_hit, v1/core/single_type_kv_cache_manager.py), also
  for DFlash. Since 0.33, the hash of a block also has the tokens after it that the drafter reads: one, or as many as
  are drafted if several MTP modules follow each other (num_hash_lookahead_tokens and num_prefill_lookahead_tokens,
  config/vllm.py). Not so with a KV connector, which --kv-offloading-size and separate prefill instances use: the block
  is computed again. A tier keeps and a prefill instance sends the blocks of all layers, those that draft included. The
  tier too needs one block more for a hit, and does not load it (is_eagle_group, offloading/scheduler.py). With several
  MTP modules, the decode instance computes the last drafted tokens less one itself (_prefill_backoff,
  nixl/base_scheduler.py; both in distributed/kv_transfer/kv_connector/v1). Draft models and n-grams change nothing.
- SGLang: with MTP and EAGLE, the keys of the radix tree are pairs of tokens, so one token less is found
  (RadixKey.maybe_to_bigram_view, mem_cache/radix_cache.py, 0.5.23). Not so with recurrent states
  (UnifiedTreeCore.is_eagle, unified_cache/unified_tree_core.py). HiCache keeps the rows of the drafts for the tokens of
  the model (PoolName.DRAFT, hybrid_cache/hybrid_pool_assembler.py of mem_cache), and a prefill instance sends them
  (PrefillBootstrapQueue, disaggregation/prefill.py).
- TensorRT-LLM: a layer that drafts reads the tokens after a position: one with EAGLE and MTP, or as many as are drafted
  if several MTP modules follow each other (draft_prompt_lookahead, _torch/speculative/interface.py). So many tokens at
  the end of a match are not used (reuse_match_backoff, runtime/kv_cache_manager_v2/_config.py), and the cache of the
  drafts keeps the same prefix (NVIDIA/TensorRT-LLM#18093). N-grams change nothing. What a draft model or DFlash reads
  is not established there.
- llama.cpp: a slot keeps and drops the same tokens in the model's context and in that of the drafts, whatever drafts
  (common_memory::seq_rm), and --cache-ram saves both (prompt_save, tools/server/server-context.cpp of
  llama-cpp-python 0.3.36). mlx-lm: a draft model keeps the tokens of a request as the model does.
"""

from __future__ import annotations

from kvcalc.engines.drafted_prefixes import PLAIN, Matching
from kvcalc.errors import UsageError
from kvcalc.model.drafting import DFLASH, DRAFT, EAGLE, EAGLE1, MTP, NGRAM, Speculation
from kvcalc.model.spec import ModelSpec, has_states, windows
from kvcalc.planning.reuse import LMCACHE
from kvcalc.question.question import CacheReuse
from kvcalc.releases import Release, release_of

_OF_HIDDEN_STATES = (MTP, EAGLE, EAGLE1)
_VLLM_LOOKS_AHEAD = Release.of(0, 33)
_TENSORRT_LLM_REUSES = Release.of(1, 3)._replace(phase=-1, of_phase=28)


def matching_of(asked: Speculation, engine: str, spec: ModelSpec, reuse: CacheReuse) -> Matching:
    """The prefixes that an engine finds while it drafts. UsageError (exit 2) if that is not known for the method."""
    moves = bool(reuse.offload) or reuse.transfer is not None
    if moves:
        _check_moved(asked, engine.partition("@")[0], reuse)
    return _matching(asked, engine, spec, moves)


def _check_moved(asked: Speculation, engine: str, reuse: CacheReuse) -> None:
    """Raise UsageError (exit 2) if it is not known what of the drafts other tiers or instances get."""
    if reuse.offload and reuse.backend == LMCACHE and asked.method != NGRAM:
        raise UsageError(
            f"--offload-backend {LMCACHE}: what it keeps of drafts is not modelled", "use --offload-backend native"
        )
    if engine == "tensorrt-llm":
        option = "--offload" if reuse.offload else "--transfer-bandwidth"
        raise UsageError(f"{option}: what tensorrt-llm moves of drafts is not modelled", "leave --speculative out")


def _matching(asked: Speculation, engine: str, spec: ModelSpec, moves: bool) -> Matching:
    name = engine.partition("@")[0]
    if name == "vllm":
        return _of_vllm(asked, engine, spec, moves)
    if name == "sglang":
        return Matching(1) if asked.method in _OF_HIDDEN_STATES and not has_states(spec) else PLAIN
    if name == "tensorrt-llm" and asked.method in (MTP, EAGLE, NGRAM):
        return _of_tensorrt_llm(asked, engine, spec)
    if name in ("logical", "llama.cpp") or (name == "mlx" and asked.method in (DRAFT, NGRAM)):
        return PLAIN
    raise UsageError(
        f"--speculative {asked}: which prefixes {name} finds again with these drafts is not modelled",
        "leave --speculative out, or use --engine vllm or sglang",
    )


def _of_tensorrt_llm(asked: Speculation, engine: str, spec: ModelSpec) -> Matching:
    release = release_of(engine)
    if asked.method == NGRAM:
        return PLAIN
    if release is not None and release < _TENSORRT_LLM_REUSES:
        raise UsageError(
            f"--speculative {asked}: TensorRT-LLM finds no prefixes of the layers that draft before 1.3.0rc28",
            "use a newer release, or leave --speculative out",
        )
    return Matching(_modules_in_turn(asked, spec))


def _modules_in_turn(asked: Speculation, spec: ModelSpec) -> int:
    """The tokens after a position that the drafting layers read: one, or one for each of several MTP modules."""
    several = asked.method == MTP and (spec.num_draft_layers or 1) > 1
    return min(spec.num_draft_layers or 1, asked.num_tokens) if several else 1


def _of_vllm(asked: Speculation, engine: str, spec: ModelSpec, moves: bool) -> Matching:
    release = release_of(engine)
    older = release is not None and release < _VLLM_LOOKS_AHEAD
    several = asked.method == MTP and min(spec.num_draft_layers or 1, asked.num_tokens) > 1
    if older or moves:
        drops = asked.method in _OF_HIDDEN_STATES or (older and asked.method == DFLASH)
        if drops and (windows(spec) or has_states(spec)):
            # The block is dropped in the groups of the drafting layers, and the others follow.
            what = "this release" if older else "vLLM with another tier or instance"
            raise UsageError(
                f"--speculative {asked}: which prefixes of {spec.name} {what} finds again is not modelled",
                "use vLLM 0.33, or leave --speculative out" if older else "leave --speculative out",
            )
        return Matching(drops_block=drops, unsent_tokens=asked.num_tokens - 1 if several else 0)
    if several:
        return Matching(asked.num_tokens)
    return Matching(1) if asked.method in _OF_HIDDEN_STATES else PLAIN

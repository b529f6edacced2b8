"""Shared prefixes, against a small simulation of a block manager, and cases counted by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcalc.engines import engine_class, load_engine
from kvcalc.engines.allocation import Allocation, Requests
from kvcalc.engines.engine import Engine
from kvcalc.engines.prefixes import PLAIN, DraftedPrefixes, Matching
from kvcalc.errors import KvcalcError, ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.memory.kv_cache import on_device
from kvcalc.model.drafting import Speculation
from kvcalc.model.hf_config import read_config
from kvcalc.model.resolve import load_model
from tests.engines.models import plain
from tests.engines.test_vllm_states import QWEN4

BF16 = DTYPES["bf16"]
SHARING = ("logical", "vllm", "sglang", "tensorrt-llm", "tensorrt-llm@1.3.0rc28")
# Full attention; two window sizes in turn with full attention; states; MLA; an indexer; chunks; windows alone.
MODELS = (
    "llama-3.1-8b", "gemma-3-27b", "gpt-oss-20b", "qwen3.5-27b", "nemotron-3-nano", "deepseek-v3", "deepseek-v3.2",
    "llama-4-scout", "mistral-7b-v0.1", "gemma-2-9b", "gemma-4-31b",
)  # fmt: skip


def rules_of(engine: str, model: str, **settings: str) -> Engine:
    return load_engine(engine, load_model(model), {name.replace("_", "-"): text for name, text in settings.items()})


def combinations() -> Iterator[tuple[str, str, Engine]]:
    for engine in SHARING:
        for model in MODELS:
            try:
                rules = rules_of(engine, model)
                rules.prefixes(rules.spec, BF16)
            except KvcalcError:
                continue
            yield engine, model, rules


class Blocks:
    """A block manager: blocks with a content hash that are found again, and counts of the requests that use each."""

    def __init__(self, block_tokens: int) -> None:
        self.size = block_tokens
        self.cached: dict[tuple[int, ...], int] = {}
        self.users: dict[int, int] = {}
        self.made = 0

    def start(self, prompt: list[int]) -> list[int]:
        """The blocks of a new request that are found: whole ones, and not the last token of the prompt."""
        found = []
        for end in range(self.size, len(prompt), self.size):
            block = self.cached.get(tuple(prompt[:end]))
            if block is None:
                break
            self.users[block] += 1
            found.append(block)
        return found

    def grow(self, blocks: list[int], tokens: list[int]) -> None:
        """Give a request blocks for all of its tokens, and remember the whole ones."""
        while len(blocks) * self.size < len(tokens):
            self.made += 1
            self.users[self.made] = 1
            blocks.append(self.made)
        for place, block in enumerate(blocks):
            if (place + 1) * self.size <= len(tokens):
                self.cached.setdefault(tuple(tokens[: (place + 1) * self.size]), block)

    @property
    def in_use(self) -> int:
        return sum(count > 0 for count in self.users.values())


def simulate(block_tokens: int, prefix: int, context: int, batch: int) -> int:
    """The blocks in use when all requests have their full length. The first one fills the cache and leaves."""
    manager = Blocks(block_tokens)
    texts = [[*range(prefix), *(10_000 * (number + 1) + k for k in range(context - prefix))] for number in range(batch)]
    first = manager.start(texts[0])
    manager.grow(first, texts[0][: max(prefix, 1)])
    for block in first:
        manager.users[block] -= 1
    for text in texts:
        manager.grow(manager.start(text), text)
    return manager.in_use


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm", "sglang", "logical"])
@pytest.mark.parametrize("size", [16, 32])
def test_as_many_blocks_as_a_block_manager_holds(engine: str, size: int) -> None:
    option = {"vllm": "block-size", "tensorrt-llm": "tokens-per-block", "sglang": "page-size"}.get(engine)
    rules = load_engine(engine, load_model("llama-3.1-8b"), {option: str(size)} if option else {})
    size = size if option else 1
    token_bytes = 2 * 32 * 8 * 128 * 2
    fixed = size * token_bytes if engine == "sglang" else 0  # the dummy page
    for prefix in (0, 1, 15, 16, 17, 64, 100, 127, 128):
        for context in (128, 129, 140, 200):
            for batch in (1, 2, 5):
                held = Allocation(rules, Requests(prefix)).batch_bytes(rules.spec, BF16, context, batch)
                assert held - fixed == simulate(size, prefix, context, batch) * size * token_bytes, (prefix, context)


def window_peak(size: int, window: int, step: int, prefix: int, context: int, batch: int) -> int:
    """The most blocks of one windowed layer in use, if all requests compute `step` tokens at a time after the prefix.

    A request frees the blocks that its window has left before it takes new ones.
    """
    found, peak = prefix // size, 0
    tokens = found * size
    while tokens < context:
        after = min(tokens + step, context)
        first = max(0, tokens - window + 1) // size
        used = range(first, -(-after // size))
        common = sum(place < found for place in used)
        peak = max(peak, common + batch * (len(used) - common))
        tokens = after
    return peak


def test_no_more_blocks_of_windows_are_needed_than_counted() -> None:
    """gpt-oss has one group of windows of 128 tokens and one of full attention, of 12 layers each."""
    rules = rules_of("vllm", "gpt-oss-20b", max_num_batched_tokens="256", no_async_scheduling="true")
    block_bytes = 16 * 12 * 2 * 8 * 64 * 2
    exact = 0
    for prefix in (0, 64, 256, 1024, 1040):
        for context in (1041, 1056, 1100, 1300, 3000):
            for batch in (1, 2, 7):
                held = Allocation(rules, Requests(prefix)).batch_bytes(rules.spec, BF16, context, batch)
                full = prefix // 16 + batch * (-(-context // 16) - prefix // 16)
                windows = held // block_bytes - full
                peak = window_peak(16, 128, 256, prefix, context, batch)
                assert peak <= windows <= batch * 25  # cdiv(128 - 1 + 256, 16) + 1
                exact += peak == windows
    assert exact >= 10  # it is not only a bound: after a long prefix, a short prompt needs exactly this


def test_a_prefix_of_nothing_changes_nothing() -> None:
    for engine, model, rules in combinations():
        shared = Allocation(rules, Requests(0))
        for share in (rules.spec, on_device(rules.spec, 2)):
            for tokens, batch in ((1, 1), (5000, 3)):
                for method in ("held_bytes", "batch_bytes", "all_stages_bytes", "replica_bytes"):
                    same = getattr(rules, method)(share, BF16, tokens, batch)
                    assert getattr(shared, method)(share, BF16, tokens, batch) == same, (engine, model, method)
                assert shared.growth(share, BF16, tokens) == rules.growth(share, BF16, tokens)


def test_a_longer_prefix_never_takes_more() -> None:
    for engine, model, rules in combinations():
        for batch in (1, 2, 64):
            before = rules.batch_bytes(rules.spec, BF16, 9000, batch)
            for prefix in (16, 100, 1000, 2500, 4096, 8192, 8999, 9000):
                held = Allocation(rules, Requests(prefix)).batch_bytes(rules.spec, BF16, 9000, batch)
                assert held <= before, (engine, model, batch, prefix)
                before = held


def test_more_tokens_or_requests_never_take_less() -> None:
    for engine, model, rules in combinations():
        shared, before = Allocation(rules, Requests(3000)), 0
        for tokens in (1, 16, 17, 500, 3000, 3001, 3016, 3017, 4000, 9000, 40_000):
            held = [shared.batch_bytes(rules.spec, BF16, tokens, batch) for batch in (1, 2, 3, 9)]
            assert held == sorted(held), (engine, model, tokens)
            if tokens > 3000:
                assert held[2] >= before, (engine, model, tokens)
                before = held[2]


def test_every_account_adds_up() -> None:
    for engine, model, rules in combinations():
        shared = Allocation(rules, Requests(4000))
        lines = shared.pool(rules.spec, BF16, 9000, 5)
        if lines is None:
            assert engine == "logical"
            continue
        assert sum(line.bytes for line in lines) == shared.held_bytes(rules.spec, BF16, 9000, 5), (engine, model)
        assert lines[-1].name == "prefix kept once"
        assert lines[-1].bytes < 0


def test_what_stays_for_a_later_request_grows_and_counts_the_prefix_once() -> None:
    for engine, model, rules in combinations():
        prefixes, before = rules.prefixes(rules.spec, BF16), 0
        shared = prefixes.found(3000)
        for tokens in (0, 16, 3000, 8192, 9000, 20_000, 70_000):
            found = prefixes.found(tokens)
            assert tokens - prefixes.block_tokens < found <= tokens
            kept = prefixes.kept_bytes(found)
            # A chunk ends, so what it keeps falls back to nothing.
            assert kept >= before or model == "llama-4-scout", (engine, model)
            assert prefixes.kept_bytes(found, min(found, shared)) <= kept
            assert kept <= prefixes.kept_bytes(shared) + prefixes.kept_bytes(found, min(found, shared)), (engine, model)
            assert prefixes.kept_bytes(found, found) == 0
            before = kept


def test_drafts_keep_a_block_more_of_what_is_kept_but_nothing_of_nothing() -> None:
    own = rules_of("vllm", "llama-3.1-8b").prefixes(load_model("llama-3.1-8b"), BF16)
    drafted, block = DraftedPrefixes([own], 3, Matching(drops_block=True)), own.unit_bytes
    for name in ("kept_bytes", "tier_bytes"):
        of_drafts = getattr(drafted, name)
        assert (of_drafts(0), of_drafts(1024, 1024), of_drafts(16, 1024)) == (0, 0, 0)
        assert (of_drafts(1024), of_drafts(1024, 1008)) == (65 * block, 2 * block)
    assert drafted.idle_bytes(0, 1024, 2) == 2 * 65 * block
    assert drafted.idle_bytes(0, 0, 2) == own.idle_bytes(0, 0, 2)
    assert drafted.batch_bytes(0, 1024, 2) == 2 * 65 * block  # the slots of drafts begin a block
    assert [drafted.found(tokens) for tokens in (15, 16, 31, 32, 1024)] == [0, 0, 0, 16, 1008]


def test_all_stages_save_alike() -> None:
    """llama-3.1-8b on two stages of vLLM and of SGLang: each has half of the layers."""
    for engine in ("vllm", "sglang"):
        spec = load_model("llama-3.1-8b")
        shared = Allocation(load_engine(engine, spec, {}, 2), Requests(4096))
        row = 2 * 32 * 8 * 128 * 2
        fixed = row if engine == "sglang" else 0
        held = (4096 + 3 * (8192 - 4096)) * row + fixed
        assert shared.batch_bytes(spec, BF16, 8192, 3) == held // 2
        assert shared.all_stages_bytes(spec, BF16, 8192, 3) == held
        largest = shared.largest_stage(spec, BF16, 8192, 3)
        assert shared.held_bytes(largest, BF16, 8192, 3) == held // 2


def test_the_last_token_of_a_prompt_is_never_shared() -> None:
    rules = rules_of("vllm", "llama-3.1-8b")
    row = 2 * 32 * 8 * 128 * 2
    held = Allocation(rules, Requests(64)).batch_bytes(rules.spec, BF16, 64, 2)
    assert held == (48 + 2 * 16) * row


def test_hybrids_share_large_blocks() -> None:
    """vLLM's block of qwen3.5-27b has 832 tokens, that of nemotron-3-nano 2,096: states are found at their ends."""
    for model, block in (("qwen3.5-27b", 832), ("nemotron-3-nano", 2096)):
        prefixes = rules_of("vllm", model).prefixes(load_model(model), BF16)
        assert prefixes.block_tokens == block
        assert prefixes.found(8000) == 8000 // block * block
        assert prefixes.found(block - 1) == 0


@pytest.mark.parametrize(("page", "block"), [("1", 64), ("64", 64), ("128", 128)])
def test_sglang_finds_states_at_multiples_of_64_tokens_or_of_a_page(page: str, block: int) -> None:
    prefixes = rules_of("sglang", "qwen3.5-27b", page_size=page).prefixes(load_model("qwen3.5-27b"), BF16)
    assert [prefixes.found(tokens) for tokens in (block - 1, 8001)] == [0, 8001 // block * block]


def test_many_windows_make_both_pools_of_sglang_larger() -> None:
    """gpt-oss-20b: requests whose own tokens are all in a window fill the pool of windows before that of all tokens.

    Each has 128 tokens, a whole window, after the prefix. Running requests need no more than these, and for those that
    come later the window at the end of the prefix stays too. The pool of windows has 8/10 of the other one's tokens.
    """
    rules = rules_of("sglang", "gpt-oss-20b")
    prefixes, row = rules.prefixes(rules.spec, BF16), 12 * 2 * 8 * 64 * 2
    for held, windows in (
        (prefixes.batch_bytes(128, 256, 100), 100 * 128),
        (prefixes.idle_bytes(128, 256, 100), 100 * 128 + 128),
    ):
        assert held == (windows * 10 // 8 + 1 + windows + 1) * row


def test_idle_contexts_of_sglang_keep_their_own_tokens_and_at_most_a_window_of_each() -> None:
    """gpt-oss-20b, beside a dummy row in each pool of 12 layers: 3 contexts of 5,000 tokens, 1,000 of them in common.

    Their windows are few, and the pool of windows has 8/10 of the other one's tokens. 1,000 contexts with 64 tokens of
    their own have only these in their windows, which fill the pool of windows first.
    """
    rules = rules_of("sglang", "gpt-oss-20b")
    prefixes, row = rules.prefixes(rules.spec, BF16), 12 * 2 * 8 * 64 * 2
    full = 1000 + 3 * 4000
    assert prefixes.idle_bytes(1000, 5000, 3) == (full + 1 + full * 8 // 10 + 1) * row
    windows = 128 + 1000 * 64
    assert prefixes.idle_bytes(7936, 8000, 1000) == (windows * 10 // 8 + 1 + windows + 1) * row


def test_windows_keep_only_the_blocks_of_the_last_window() -> None:
    """gpt-oss-20b: 12 layers of full attention, and 12 with a window of 128 tokens, whose last 127 tokens are kept."""
    row = 12 * 2 * 8 * 64 * 2
    for engine, window in (("vllm", 128), ("sglang", 128), ("logical", 128)):
        rules = rules_of(engine, "gpt-oss-20b")
        prefixes = rules.prefixes(rules.spec, BF16)
        assert prefixes.kept_bytes(8000) == (8000 + window) * row
        # After a prefix of 7,936 tokens, only 64 tokens of the window are the session's own.
        assert prefixes.kept_bytes(8000, 7936) == (64 + 64) * row
    # TensorRT-LLM keeps whole blocks of 32 tokens of the window. Before 1.3.0rc28, it kept all tokens.
    for engine, window in (("tensorrt-llm@1.3.0rc28", 128), ("tensorrt-llm", 8000)):
        assert rules_of(engine, "gpt-oss-20b").prefixes(rules.spec, BF16).kept_bytes(8000) == (8000 + window) * row


def test_requests_of_tensorrt_llm_hold_windows_of_their_own_after_the_prefix() -> None:
    """gpt-oss-20b: a window of 128 tokens is in at most 5 blocks of 32, and the last one of a prefix in 4.

    One request at a time computes its prompt, and has all blocks after the prefix until then.
    """
    rules, slot, page = rules_of("tensorrt-llm@1.3.0rc28", "gpt-oss-20b"), 32 * 12 * 2 * 8 * 64 * 2, 2 << 20
    prefixes = rules.prefixes(rules.spec, BF16)
    for after, common, own in ((1, 4, 1), (3, 2, 3), (4, 1, 4), (5, 0, 5), (90, 0, 5)):
        for batch in (1, 2, 7):
            slots = (32 + batch * after) + (common + (batch - 1) * own + after)
            held = prefixes.batch_bytes(1024, 1024 + 32 * after, batch)
            assert held == -(-slots * slot // page) * page, (after, batch)


def test_what_a_prefill_instance_sends() -> None:
    """vLLM sends one more block of a window: it may begin inside a block (blocks_per_sw of nixl/base_scheduler.py)."""
    row = 12 * 2 * 8 * 64 * 2
    rules = rules_of("vllm", "gpt-oss-20b")
    prefixes = rules.prefixes(rules.spec, BF16)
    assert prefixes.sent_bytes(8001) == (8016 + 128 + 16) * row
    assert prefixes.sent_bytes(40) == 2 * 48 * row
    assert rules_of("sglang", "gpt-oss-20b").prefixes(rules.spec, BF16).sent_bytes(8001) == (8001 + 128) * row
    hybrid = rules_of("vllm", "qwen3.5-27b")
    # One block of states in each of the three groups with states, and all blocks of the group with attention.
    assert hybrid.prefixes(hybrid.spec, BF16).sent_bytes(8000) == (10 + 3) * 832 * 16 * 2 * 4 * 256 * 2


def test_what_vllm_keeps_sends_and_copies_of_a_window_of_129_tokens() -> None:
    """A hit needs the last 128 tokens, in 8 blocks of 16 (SlidingWindowManager of single_type_kv_cache_manager.py).

    The CPU's tier keeps the blocks of a whole window (get_sliding_window_size_in_chunks, offloading/config.py), and a
    prefill instance sends one more, since a window may begin inside a block (nixl/base_scheduler.py).
    """
    spec = read_config(plain(4, model_type="mistral", sliding_window=129), "a model", "a test")
    prefixes = load_engine("vllm", spec, {}).prefixes(spec, BF16)
    block = prefixes.unit_bytes
    for name, blocks in (
        ("kept_bytes", (0, 1, 8, 8, 8)), ("sent_bytes", (0, 1, 8, 9, 10)), ("tier_bytes", (0, 1, 8, 9, 9)),
    ):  # fmt: skip
        of = getattr(prefixes, name)
        assert tuple(of(tokens) // block for tokens in (0, 16, 128, 144, 8000)) == blocks, name
    # A session after a prefix of others has the blocks after it alone.
    for after, own, in_tier in ((7984, 1, 1), (7936, 4, 4), (7840, 8, 9)):
        assert (prefixes.kept_bytes(8000, after), prefixes.tier_bytes(8000, after)) == (own * block, in_tier * block)


def test_vllm_keeps_the_blocks_of_the_open_chunk() -> None:
    """Llama 4 Scout: a group of full attention, three with chunks of 8,192 tokens (ChunkedLocalAttentionManager)."""
    rules = rules_of("vllm", "llama-4-scout")
    prefixes, block = rules.prefixes(rules.spec, BF16), 16
    for tokens, chunk in ((16, 16), (8192, 0), (8208, 16), (20_000, 20_000 - 2 * 8192)):
        blocks = tokens // block + 3 * chunk // block
        assert prefixes.kept_bytes(tokens) == blocks * prefixes.unit_bytes
        # The CPU's tier keeps up to a whole chunk, and another instance gets all tokens.
        assert prefixes.tier_bytes(tokens) == (tokens + 3 * min(tokens, 8192)) // block * prefixes.unit_bytes
        assert prefixes.sent_bytes(tokens) == 4 * tokens // block * prefixes.unit_bytes


def test_vllm_s_requests_have_their_own_states_after_a_common_prefix() -> None:
    """Qwen3.5-27B: one group of attention and three of states. vLLM reserves three states for a request (MambaSpec).

    The prefix is 9 blocks of 832 tokens. The rest of each request fits into one.
    """
    rules = rules_of("vllm", "qwen3.5-27b")
    prefixes = rules.prefixes(rules.spec, BF16)
    for batch in (1, 3):
        held = prefixes.batch_bytes(9 * 832, 9 * 832 + 100, batch)
        assert held == (9 + batch * (1 + 3 * 3)) * prefixes.unit_bytes


def test_vllm_s_requests_share_states_that_are_kept_for_every_block() -> None:
    """Jamba in 0.27: one group of attention, seven of states, and a state for every block of 2,048 tokens."""
    spec = load_model("jamba-v0.1")
    prefixes = load_engine("vllm@0.27", spec, {"enable-prefix-caching": ""}).prefixes(spec, BF16)
    assert prefixes.batch_bytes(4096, 8192, 3) == 8 * (2 + 3 * 2) * prefixes.unit_bytes
    # A later request needs the state at the end of the prefix alone, and so does another instance.
    assert prefixes.kept_bytes(4096) == prefixes.sent_bytes(4096) == prefixes.tier_bytes(4096)
    assert (prefixes.kept_bytes(4096), prefixes.kept_bytes(4096, 2048)) == tuple(
        (blocks + 7) * prefixes.unit_bytes for blocks in (2, 1)
    )


def test_a_block_of_vllm_has_the_tokens_of_every_rank_that_divides_them() -> None:
    """DeepSeek-V3 on 8 decode context parallel ranks: a block of 16 tokens on each is 128 tokens of a request."""
    rules = rules_of("vllm", "deepseek-v3", decode_context_parallel_size="8")
    prefixes, block = rules.prefixes(rules.spec, BF16), 16 * 61 * 576 * 2
    assert (prefixes.block_tokens, prefixes.found(1000)) == (128, 7 * 128)
    for name in ("kept_bytes", "sent_bytes", "tier_bytes"):
        assert getattr(prefixes, name)(1280) == 10 * block, name
    assert prefixes.sent_bytes(1281) == 11 * block
    assert prefixes.kept_bytes(1280, 256) == 8 * block
    assert prefixes.batch_bytes(1280, 2561, 3) == (10 + 3 * 11) * block


def test_vllm_finds_no_ring_again_but_sends_it() -> None:
    """Qwen4-Exp: a group of attention, four of states, and the ring of an open index key (CircularBufferSpec)."""
    spec = read_config(QWEN4, "a model", "a test")
    rules = load_engine("vllm", spec, {})
    prefixes, size = rules.prefixes(spec, BF16), 1088
    assert prefixes.kept_bytes(4 * size) == prefixes.tier_bytes(4 * size) == (4 + 4) * prefixes.unit_bytes
    assert prefixes.sent_bytes(4 * size) == (4 + 4 + 1) * prefixes.unit_bytes
    assert prefixes.sent_bytes(0) == prefixes.kept_bytes(0) == 0
    assert prefixes.kept_bytes(4 * size, 2 * size) == (2 + 4) * prefixes.unit_bytes
    assert prefixes.batch_bytes(4 * size, 6 * size, 3) == (4 + 3 * (2 + 4 * 3 + 1)) * prefixes.unit_bytes


def test_hicache_divides_its_memory_like_the_device() -> None:
    """gpt-oss-20b: for every token of full attention, the host has 0.8 tokens of windows, as the device has."""
    rules = rules_of("sglang", "gpt-oss-20b")
    row = 12 * 2 * 8 * 64 * 2
    assert rules.prefixes(rules.spec, BF16).tier_bytes(10_000) == 10_000 * row * 18 // 10
    hybrid = rules_of("sglang", "qwen3.5-27b")
    prefixes = hybrid.prefixes(hybrid.spec, BF16)
    with pytest.raises(ModelError, match="HiCache"):
        prefixes.tier_bytes(10_000)


def test_engines_that_copy_a_prefix_share_nothing() -> None:
    for engine in ("llama.cpp", "mlx"):
        rules = rules_of(engine, "llama-3.1-8b")
        prefixes = rules.prefixes(rules.spec, BF16)
        assert (prefixes.found(8000), prefixes.shared(8000)) == (8000, 0)
        other = rules_of(engine, "gemma-3-27b")
        with pytest.raises(ModelError, match="windows or states"):
            other.prefixes(other.spec, BF16)


def test_engines_and_models_without_a_prefix_cache_are_refused() -> None:
    cases: tuple[tuple[str, str, dict[str, str]], ...] = (
        ("transformers", "llama-3.1-8b", {}), ("vllm", "whisper-large-v3", {}), ("sglang", "whisper-large-v3", {}),
        ("vllm", "bert-base", {}), ("logical", "bert-base", {}),
    )  # fmt: skip
    for engine, model, settings in cases:
        rules = rules_of(engine, model, **settings)
        with pytest.raises(UsageError, match="prefix"):
            rules.prefixes(rules.spec, BF16)


# Prefix, context and requests; then the tokens that a request finds and the most blocks in use. From the KVCacheManager
# of vLLM 0.33.0, run without a device: one request fills the cache and leaves, then all others start at once and
# compute 256 tokens (qwen3.5-27b: one block) at a time, each with its own text after the prefix.
VLLM_ROWS = {
    "llama-3.1-8b": [
        (0, 129, 3, 0, 27), (1, 129, 3, 0, 27), (16, 129, 2, 16, 17), (100, 200, 5, 96, 41), (128, 128, 2, 112, 9),
        (127, 128, 2, 112, 9), (2500, 4000, 9, 2496, 1002),
    ],
    "gpt-oss-20b": [
        (0, 1041, 2, 0, 176), (64, 1056, 1, 64, 88), (256, 1041, 2, 256, 160), (1024, 1056, 1, 1024, 76),
        (1024, 1041, 7, 1024, 100), (1024, 1100, 7, 1024, 142), (1040, 1300, 7, 1040, 297),
        (1024, 3000, 7, 1024, 1072), (3990, 4000, 16, 3984, 289), (4000, 4000, 3, 3984, 263),
    ],
    "qwen3.5-27b": [
        (0, 3000, 2, 0, 20), (800, 3000, 2, 784, 19), (1600, 5000, 3, 1568, 35), (4000, 9000, 4, 3920, 57),
        (8000, 8000, 2, 7840, 21), (8000, 9000, 5, 7840, 50), (8000, 20000, 5, 7840, 120),
    ],
}  # fmt: skip


@pytest.mark.parametrize("model", VLLM_ROWS)
def test_vllm_s_own_block_manager_finds_and_holds_as_much(model: str) -> None:
    rules = rules_of("vllm", model, max_num_batched_tokens="256", no_async_scheduling="true")
    if model == "qwen3.5-27b":
        rules = rules_of("vllm", model, gdn_prefill_backend="triton")  # two states per request, and no checkpoints
    prefixes, equal = rules.prefixes(rules.spec, BF16), 0
    for prefix, context, batch, found, blocks in VLLM_ROWS[model]:
        assert prefixes.found(min(prefix, context - 1)) == found
        held = Allocation(rules, Requests(prefix)).held_bytes(rules.spec, BF16, context, batch) // prefixes.unit_bytes
        alone = rules.held_bytes(rules.spec, BF16, context, batch) // prefixes.unit_bytes
        # A request's windows and states are counted as vLLM reserves them, which may be more than it holds.
        assert blocks <= held <= alone
        equal += blocks == held
    assert equal >= {"llama-3.1-8b": 7, "gpt-oss-20b": 5, "qwen3.5-27b": 6}[model]


@pytest.mark.parametrize("engine", ["logical", "vllm", "sglang", "tensorrt-llm"])
def test_a_draft_model_s_pool_keeps_its_prefixes_beside_the_model_s(engine: str) -> None:
    own, drafts = (
        (rules := rules_of(engine, model)).prefixes(rules.spec, BF16) for model in ("llama-3.1-8b", "llama-3.2-1b")
    )
    both = DraftedPrefixes([own, drafts], 0, PLAIN)
    assert both.unit_bytes == own.unit_bytes + drafts.unit_bytes
    assert both.block_tokens == own.block_tokens == drafts.block_tokens
    for name, asked in (
        ("batch_bytes", (1024, 9000, 3)), ("idle_bytes", (1024, 9000, 3)), ("kept_bytes", (9008, 1024)),
        ("tier_bytes", (9008, 1024)), ("sent_bytes", (9008,)), ("loaded_bytes", (9008,)),
    ):  # fmt: skip
        whole = getattr(both, name)(*asked)
        assert whole == getattr(own, name)(*asked) + getattr(drafts, name)(*asked) > getattr(own, name)(*asked), name


@pytest.mark.parametrize(
    ("engine", "latent_copies", "copies_at_once", "drafted"),
    [
        # kv_offload and offloading/config.py of vLLM 0.33.0; --num-speculative-tokens counts the drafted tokens.
        ("vllm", 1, True, {"num-speculative-tokens": "3"}),
        # write_through and mla_host_dedup.py of SGLang 0.5.23, which counts the token before the drafted ones too.
        ("sglang", 1, True, {"speculative-num-draft-tokens": "4"}),
        # Blocks of each device move when they are evicted (kvCacheManager.h of TensorRT-LLM).
        ("tensorrt-llm", 8, False, {}),
        # llama-server saves the context of a slot (ggml-org/llama.cpp#16391).
        ("llama.cpp", 8, False, {"draft-max": "3"}),
    ],
)
def test_how_an_engine_keeps_contexts_outside_the_device_and_counts_drafts(
    engine: str, latent_copies: int, copies_at_once: bool, drafted: dict[str, str]
) -> None:
    """What every device has in full, MLA, may be kept once for all of them. Heads are divided, so all are kept."""
    reuse = engine_class(engine).reuse()
    for model, copies in (("deepseek-v3", latent_copies), ("llama-3.1-8b", 8)):
        spec = load_model(model)
        assert reuse.tier_copies(spec, on_device(spec, 8), 8) == copies
    assert reuse.copies_at_once == copies_at_once
    assert reuse.draft_settings(Speculation("mtp", 3), {}) == drafted
    if engine == "llama.cpp":
        with pytest.raises(UsageError, match=r"DFlash is not modelled for llama\.cpp"):
            reuse.check_drafts(Speculation("dflash", 3), load_model("qwen3-8b"), {})
    else:
        reuse.check_drafts(Speculation("dflash", 3), load_model("qwen3-8b"), {})
    # SGLang drafts n-grams in trees of 10 branches, unless the command says otherwise.
    trees = {"speculative-eagle-topk": "10"} if engine == "sglang" else {}
    assert reuse.draft_settings(Speculation("ngram", 3), {}) == {**drafted, **trees}
    given = {"speculative-eagle-topk": "1"} if engine == "sglang" else {}
    assert reuse.draft_settings(Speculation("ngram", 3), given) == {**drafted, **given}

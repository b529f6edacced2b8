"""A cache that is used again, as a question asks for it: shared prefixes, sessions, tiers of memory, and transfers.

Everything here is called only if a question asks for one of them. A tier is memory that keeps what a
device's cache drops: host memory, disks, or another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvcalc.engines import engine_class
from kvcalc.engines.allocation import Allocation
from kvcalc.engines.engine import Engine
from kvcalc.engines.prefixes import Prefixes
from kvcalc.engines.reuse import CPU, DISK, TIERS
from kvcalc.errors import UsageError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.workload import Workload
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.question.question import CacheReuse, SpeedQuestion
from kvcalc.records import NamedTuple
from kvcalc.search import largest_where, smallest_where
from kvcalc.units import check_count

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu


MOST_TURNS = 1000


class Turn(NamedTuple):
    """One turn of a session: the tokens of its prompt, of which `reused_tokens` are found, and those at its end."""

    prompt_tokens: int
    reused_tokens: int
    end_tokens: int


def check_reuse(reuse: CacheReuse, has_device: bool) -> None:
    """Raise UsageError (exit 2) for a value that is out of range, or an option that something else is missing for."""
    check_count(reuse.prefix_tokens, "prefix_tokens", least=0)
    if reuse.turns is not None:
        check_count(reuse.turns, "turns", least=2)
        if reuse.turns > MOST_TURNS:
            raise UsageError(f"--turns {reuse.turns}: must be at most {MOST_TURNS:,}", "for example --turns 8")
    check_tiers(reuse.offload, reuse.bandwidths)
    if reuse.transfer is not None and not has_device:
        raise UsageError("--transfer-bandwidth needs a device", "for example --gpu h100")


def check_tiers(offload: Sequence[tuple[str, int]], bandwidths: Sequence[tuple[str, int]]) -> None:
    """Raise UsageError (exit 2) for an unknown tier, a bad size or rate, or the rate of a tier without a size."""
    for option, rows in (("--offload", offload), ("--offload-bandwidth", bandwidths)):
        for name, amount in rows:
            if name not in TIERS:
                raise UsageError(f"{option} {name[:40]!a}: not a tier", f"one of {', '.join(TIERS)}")
            check_count(amount, option)
    missing = [name for name, _ in bandwidths if name not in dict(offload)]
    if missing:
        hint = f"for example --offload {missing[0]}=200GiB"
        raise UsageError(f"--offload-bandwidth {missing[0]}: --offload has no such tier", hint)


def prompt_tokens_of(speed: SpeedQuestion | None, workload: Workload) -> int:
    """The tokens of a prompt. Without requests to serve, the whole context is one."""
    given = None if speed is None else speed.prompt_tokens
    return workload.context_tokens if given is None else given


def turns_of(reuse: CacheReuse, prompt_tokens: int, context_tokens: int, prefixes: Prefixes) -> list[Turn]:
    """The turns of a session that grows evenly from the prefix to a context of `context_tokens` tokens.

    The last one has a prompt of `prompt_tokens`. Without several turns, that is the only one, and it finds the prefix.
    An engine computes at least the last token of a prompt. UsageError (exit 2) if the answers leave no tokens for
    prompts.
    """
    count, prefix, answer = reuse.turns or 1, reuse.prefix_tokens, context_tokens - prompt_tokens
    if count > 1 and (context_tokens - prefix) // count <= answer:
        raise UsageError(
            f"--turns {count}: a turn has {(context_tokens - prefix) // count:,} tokens, and its answer {answer:,}",
            "the lengths are those of the last turn, whose prompt holds the whole session: use a longer prompt",
        )
    turns, before = [], prefix
    for number in range(1, count + 1):
        end = prefix + (context_tokens - prefix) * number // count
        reused = prefixes.found(min(before, end - answer - 1))
        turns.append(Turn(end - answer, reused, end))
        before = end
    return turns


def resolve(
    reuse: CacheReuse, speed: SpeedQuestion, allocation: Allocation, share: ModelSpec, workload: Workload
) -> tuple[float, list[Note]]:
    """The share of a prompt that is found, as it was given or as the prefix and the turns give it, and notes about it.

    UsageError (exit 2) if the prefix is longer than the prompt, or if the rate given is lower.
    """
    given, engine = speed.prefix_hit_rate, allocation.engine
    options = {"--prefix-tokens": reuse.prefix_tokens, "--turns": reuse.turns, "--offload": reuse.offload}
    # A transfer alone needs no prefix cache.
    option = next(filter(options.get, options), None)
    if option is not None:
        check_caching(engine, option)
    if not (reuse.prefix_tokens or reuse.turns):
        return given, prefix_hit_notes(given, engine, engine.spec)
    prefixes, prompt = allocation.prefixes(share, workload.kv_dtype), prompt_tokens_of(speed, workload)
    if reuse.prefix_tokens > prompt:
        raise UsageError(
            f"--prefix-tokens {reuse.prefix_tokens}: the prompt has {prompt:,} tokens",
            f"use at most {prompt}, or a longer prompt",
        )
    last = turns_of(reuse, prompt, workload.context_tokens, prefixes)[-1]
    rate = last.reused_tokens / prompt
    if given and given < rate:
        option = "--turns" if reuse.turns else "--prefix-tokens"
        raise UsageError(
            f"--prefix-hit-rate {given:g} contradicts {option}: {rate:.1%} of each prompt are found",
            "leave --prefix-hit-rate out, or give a higher rate",
        )
    notes = []
    if not prefixes.shares_memory and reuse.prefix_tokens:
        text = f"{engine.name} copies a prefix for every request: it saves prefill, but no memory"
        notes.append(Note("kv_cache", "prefix-copied", text))
    elif reuse.prefix_tokens and not prefixes.found(min(reuse.prefix_tokens, prompt - 1)):
        text = f"{engine.name} finds prefixes in steps of {prefixes.block_tokens:,} tokens, so this one is not found"
        notes.append(Note("kv_cache", "prefix-too-short", text))
    return max(rate, given), notes


def check_caching(engine: Engine, option: str) -> None:
    """Raise UsageError (exit 2) if the engine's settings turn the prefix cache off, which `option` asks about."""
    if engine.prefixes_off:
        raise UsageError(f"{option}: {engine.name} caches no prefixes of {engine.spec.name}", engine.prefixes_off)


def prefix_hit_notes(rate: float, engine: Engine, spec: ModelSpec) -> list[Note]:
    """The notes about a hit rate; none for 0.

    Raises UsageError (exit 2) for a rate outside 0 to below 1, and if the engine finds no prompts in its cache.
    """
    given = f"--prefix-hit-rate {rate:g}"
    if not 0 <= rate < 1:
        raise UsageError(f"{given}: must be at least 0 and below 1", "for example --prefix-hit-rate 0.3")
    if not rate:
        return []
    engine_class(engine.name).reuse().check_hits(given, spec)
    check_caching(engine, "--prefix-hit-rate")
    text = f"{rate:.0%} of each prompt is found in the prefix cache: no prefill for it, but memory as without hits"
    return [Note("throughput", "prefix-hits", text)]


def cached_tokens(
    reuse: CacheReuse, rate: float, tokens: int, allocation: Allocation, share: ModelSpec, dtype: Dtype
) -> float:
    """The tokens of a prompt of `tokens` tokens that are found, if the whole context is the prompt.

    `rate` is the hit rate of a question. With a prefix or turns, it is that of another length.
    """
    if not (reuse.prefix_tokens or reuse.turns):
        return rate * tokens
    shorter = reuse._replace(prefix_tokens=min(reuse.prefix_tokens, tokens))
    return turns_of(shorter, tokens, tokens, allocation.prefixes(share, dtype))[-1].reused_tokens


# One NVMe drive on four lanes of PCIe 4.0 reads 6,800 MB/s (Micron 7450, data sheet: 128 KB sequential reads).
NVME_BYTES_PER_SECOND = 6_800_000_000

# NVLink-C2C between Grace and Hopper: 900 GB/s in both directions together (NVIDIA GH200 data sheet).
_C2C = {"gh200-96gb": 450_000_000_000, "gh200-144gb": 450_000_000_000}


class Tier(NamedTuple):
    """A tier of `memory_bytes`, which is read at `bytes_per_second`, or None if that is not known."""

    name: str
    memory_bytes: int
    bytes_per_second: int | None


def contexts_kept(memory_bytes: int, context_bytes: int) -> int | None:
    """How many contexts of `context_bytes` bytes each are kept in `memory_bytes`. None if a context takes nothing."""
    return max(memory_bytes, 0) // context_bytes if context_bytes else None


def longest_kept(memory_bytes: int, bytes_of: Callable[[int], int], most_tokens: int, step: int) -> int:
    """The most tokens of one context, up to `most_tokens`, whose bytes fit. It is a multiple of `step`.

    `bytes_of` gives the bytes of a number of tokens, and must not fall as that number grows.
    """
    return largest_where(lambda count: bytes_of(count * step) <= memory_bytes, 0, most_tokens // step) * step


def tokens_kept(memory_bytes: int, bytes_of: Callable[[int], int], tokens: int, step: int) -> int | None:
    """The tokens kept in contexts of `tokens` tokens each: of as many whole contexts as fit, and of one more in part.

    None if a context takes nothing. `bytes_of` and `step` are those of `longest_kept`.
    """
    whole = contexts_kept(memory_bytes, bytes_of(tokens))
    if whole is None:
        return None
    rest = max(memory_bytes, 0) - whole * bytes_of(tokens)
    return whole * tokens + longest_kept(rest, bytes_of, tokens, step)


def break_even_tokens(
    move: Callable[[int], float], compute: Callable[[int], float], step: int, most: int
) -> int | None:
    """The shortest context from which on moving it back takes no longer than computing it. None if no context does.

    `move` and `compute` give the seconds of a number of tokens. The time to move grows with the tokens, and that to
    compute at least so: from the result on, moving pays for every length. The result is a multiple of `step`.
    """

    def pays(steps: int) -> bool:
        return move(steps * step) <= compute(steps * step)

    limit = most // step
    if limit < 1 or not pays(limit):
        return None
    # All powers of two are tried, because moving may pay for a few tokens and then not.
    longest = max((1 << power for power in range((limit - 1).bit_length()) if not pays(1 << power)), default=0)
    return smallest_where(pays, longest + 1, min(2 * longest, limit) if longest else 1) * step


def tier_rate(name: str, gpu: Gpu | None, given: Mapping[str, int], notes: list[Note], part: str) -> int | None:
    """Bytes per second at which a tier is read: by each device if it is host memory, else in total.

    None if the rate is not known. A note about `part` of the document then says how to set it. Without a device nothing
    is timed, and there is no note about its link.
    """
    if name in given:
        return given[name]
    rate: int | None = None
    if name == CPU:
        if gpu is None:
            return None
        rate = _C2C.get(gpu.name, gpu.pcie_bytes_per_second)
        text, example = f"the link of {gpu.name} to host memory is not known", "50GB/s"
    elif name == DISK:
        rate = NVME_BYTES_PER_SECOND
        text, example = f"disk is assumed to read {rate / 1e9:g} GB/s, one NVMe drive on PCIe 4.0", "6GB/s"
    else:
        text, example = f"the rate of {name} is not known", "ethernet-100g"
    if rate is None or name == DISK:
        notes.append(Note(part, "tier-bandwidth", f"{text}; --offload-bandwidth {name}={example} sets it"))
    return rate

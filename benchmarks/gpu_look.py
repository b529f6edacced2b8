"""A first look at one device: versions, clocks, roofs, and what torch's attention kernels reach. One line per check.

    python benchmarks/gpu_look.py [--device cuda] [--scale 1]

`benchmarks/gpu.py` runs this first. A check that fails says so, and the next one runs. The last check makes a graph
capture fail on purpose, after which some releases of torch cannot go on. On a CPU, graphs are left out. `--scale`
divides the sizes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], object]

# Batch, query heads, KV heads and tokens of one decode step: llama-3-70b short, long and batched, and llama-7b.
SHAPES = ((1, 64, 8, 8192), (1, 64, 8, 32768), (16, 64, 8, 8192), (1, 32, 32, 8192))
KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
SMI = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,clocks_event_reasons.active"
_COVER_CYCLES = 200_000


class Look:
    """The checks, on one device. `scale` divides the sizes."""

    def __init__(self, device: torch.device, scale: int) -> None:
        self.device, self.scale = device, scale
        self.is_cuda = device.type == "cuda"
        self.read_rate = float("nan")

    def checks(self) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
        """The name of every check, and the function that yields its lines."""
        yield "versions", self.versions
        yield "clocks before", self.clocks
        yield "read and copy", self.reading
        yield "matmul", self.multiplying
        for shape in SHAPES:
            yield f"attention {shape}", partial(self.attention, *shape)
        if self.is_cuda:
            yield "a new KV length", self.lengths
            yield "flush and cover", self.timing
            yield "clocks after", self.clocks
            yield "a capture that fails", self.failing

    def versions(self) -> Iterator[str]:
        yield f"torch {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}"
        if self.is_cuda:
            found = torch.cuda.get_device_properties(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            yield f"cuDNN {torch.backends.cudnn.version()}, compute capability {found.major}.{found.minor}"
            yield f"{found.name}, {found.multi_processor_count} multiprocessors, L2 {found.L2_cache_size:,} bytes"
            yield f"{free:,} of {total:,} bytes free"

    def clocks(self) -> Iterator[str]:
        if not self.is_cuda:
            yield f"{torch.get_num_threads()} threads"
            return
        command = ["nvidia-smi", f"--query-gpu=driver_version,{SMI}", "--format=csv"]
        yield from subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()

    def reading(self) -> Iterator[str]:
        x = self.random((1 << 30) // self.scale)
        first = self.all_seconds(x.sum, 1)[0]
        self.settle(x.sum)
        best = min(self.all_seconds(x.sum, 20))
        y = torch.empty_like(x)
        copy = min(self.all_seconds(lambda: y.copy_(x), 20))
        size = x.numel() * 4
        self.read_rate = size / best
        yield f"read {size / first / 1e12:.3g} TB/s in the first pass, {size / best / 1e12:.3g} TB/s at best"
        yield f"copy {2 * size / copy / 1e12:.3g} TB/s"

    def multiplying(self) -> Iterator[str]:
        width = max(64, 8192 // self.scale)
        for what in ("zeros", "random numbers"):
            a, b = (self.random(width, width).to(torch.bfloat16) * (what != "zeros") for _ in range(2))
            taken = self.all_seconds(lambda: a @ b, 30)
            rates = [2 * width**3 / s / 1e12 for s in (taken[0], min(taken), statistics.median(taken[-10:]))]
            yield "{}: {:.3g} TFLOP/s in the first call, {:.3g} at best, {:.3g} in the end".format(what, *rates)

    def attention(self, batch: int, heads: int, kv_heads: int, tokens: int) -> Iterator[str]:
        query, key, value = self.qkv(batch, heads, kv_heads, max(64, tokens // self.scale))
        ideal = 2 * key.numel() * key.element_size() / self.read_rate
        if self.is_cuda:
            chosen = SDPBackend(torch._fused_sdp_choice(query, key, value)).name
            yield f"torch chooses {chosen}; reading takes {ideal * 1e6:.1f} us"
        for name in KERNELS:
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    taken = self.step_seconds(lambda: F.scaled_dot_product_attention(query, key, value))
                yield f"{name} {taken * 1e6:.1f} us, {ideal / taken:.0%} of the read rate"
            except RuntimeError as error:
                yield f"{name}: {first_line(error)[:80]}"

    def lengths(self) -> Iterator[str]:
        """The time of a call with a KV length that was not used before, which some kernels plan for."""
        query, key, value = self.qkv(1, 64, 8, 2048)
        for name in KERNELS[:3]:
            taken: list[float] = []
            for tokens in range(1000, 1020):
                part = key[:, :, :tokens], value[:, :, :tokens]
                with sdpa_kernel(getattr(SDPBackend, name)):
                    taken += self.all_seconds(lambda: F.scaled_dot_product_attention(query, *part), 2)
            new, again = (statistics.median(times) * 1e3 for times in (taken[::2], taken[1::2]))
            yield f"{name}: {new:.3f} ms for a new length, {again:.3f} ms for the same again"

    def timing(self) -> Iterator[str]:
        """How much the flush before a step, and covering its launch, change its time."""
        query, key, value = self.qkv(1, 64, 8, 8192)

        def step() -> object:
            return F.scaled_dot_product_attention(query, key, value)

        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            for flush in ("read", "zero", "none"):
                taken = [self.step_seconds(step, flush, cover) * 1e6 for cover in (True, False)]
                yield "flush by {}: {:.1f} us, with the launch not covered {:.1f} us".format(flush, *taken)

    def failing(self) -> Iterator[str]:
        one = torch.ones(1, device=self.device)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                one.item()
            yield "captured, although it synchronizes"
        except RuntimeError as error:
            yield first_line(error)
        torch.cuda.empty_cache()
        yield f"the allocator still works: {float(torch.ones(1 << 20, device=self.device).sum()):.0f}"

    def random(self, *shape: int) -> torch.Tensor:
        """Random numbers in fp32."""
        return torch.empty(shape, device=self.device).normal_()

    def qkv(self, batch: int, heads: int, kv_heads: int, tokens: int) -> list[torch.Tensor]:
        """A decode step's query, with the heads of a group as its rows, and K and V, in bf16."""
        rows = (heads // kv_heads, tokens, tokens)
        return [self.random(batch, kv_heads, count, 128).to(torch.bfloat16) for count in rows]

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def settle(self, call: Call) -> None:
        """Repeat `call` for half a second, so that a GPU's clocks settle."""
        until = time.perf_counter() + 0.5 / self.scale
        while time.perf_counter() < until:
            call()
            self.synchronize()

    def all_seconds(self, call: Call, count: int) -> list[float]:
        """Wall seconds of `count` calls, each from an idle device to an idle device."""
        taken = []
        for _ in range(count):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            taken.append(time.perf_counter() - start)
        return taken

    def step_seconds(self, call: Call, flush: str = "read", cover: bool = True) -> float:
        """The median seconds of a step. On CUDA a graph, between events, after a flush of four times the L2."""
        if not self.is_cuda:
            return statistics.median(self.all_seconds(call, 10))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        big = torch.ones(torch.cuda.get_device_properties(self.device).L2_cache_size, device=self.device)
        taken = []
        for _ in range(20):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if flush == "read":
                big.sum()
            elif flush == "zero":
                big[: big.numel() // 2].zero_()
            if cover:
                torch.cuda._sleep(_COVER_CYCLES)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        return statistics.median(taken)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1)
    arguments = parser.parse_args()
    look = Look(torch.device(arguments.device), arguments.scale)
    with torch.inference_mode():
        for name, check in look.checks():
            try:
                for line in check():
                    print(f"{name}: {line}", flush=True)
            except Exception as error:  # any failure of one check
                print(f"{name}: FAILED: {first_line(error)}", flush=True)
            if look.is_cuda and name != "a capture that fails":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

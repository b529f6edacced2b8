"""The simulated device refuses what a CUDA device refuses, counts what it counts, and computes what torch computes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.simulated_cuda import CaptureError, Machine, kernel, simulated_cuda

CUDA = torch.device("cuda")


@pytest.fixture(params=["no_grad", "inference_mode"])
def device(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with simulated_cuda(device_count=2) as machine, getattr(torch, request.param)():
        yield machine


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `call` as the documentation of torch says, with a warm-up on another stream."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def test_tensors_are_on_the_device_and_have_the_values_of_the_host(device: Machine) -> None:
    x = torch.randn(3, 5)
    y = x.to(CUDA)
    assert (y.device, y.is_cuda, (y @ y.T).device) == (torch.device("cuda", 0), True, torch.device("cuda", 0))
    for a, b in (
        (y, x),
        (y[1:, ::2] * 2, x[1:, ::2] * 2),
        (y.T.contiguous(), x.T),
        (F.softmax(y, -1), F.softmax(x, -1)),
    ):
        assert torch.equal(a.cpu(), b)
    y[1] = 7
    assert y.tolist()[1] == [7.0] * 5
    assert float(y.view(-1)[5]) == 7
    layer = torch.nn.Linear(5, 2, device="cuda")
    assert layer.weight.is_cuda
    assert torch.equal(layer(y).cpu(), F.linear(y.cpu(), layer.weight.cpu(), layer.bias.cpu()))
    assert torch.zeros(4, device="cuda:1").device == torch.device("cuda", 1)


def test_torch_checks_its_arguments_as_on_a_real_device(device: Machine) -> None:
    for fraction, where, error in (
        (0.5, CUDA, ValueError), (0.5, "cpu", ValueError), (1, 0, TypeError), (1.5, 0, ValueError),
        (0.5, 2, RuntimeError),
    ):  # fmt: skip
        with pytest.raises(error):
            torch.cuda.set_per_process_memory_fraction(fraction, where)
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    assert device.devices[1].limit == device.devices[1].total // 2
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(2)
    with pytest.raises(RuntimeError, match="invalid value of debug_mode"):
        torch.cuda.set_sync_debug_mode("loud")
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


def test_tensors_of_two_devices_are_refused(device: Machine) -> None:
    here = torch.ones(3, device="cuda")
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        with pytest.raises(RuntimeError, match="on the same device, but found at least two"):
            here + other
    assert (here * torch.tensor(2.0)).tolist() == [2, 2, 2]
    assert here[torch.tensor([0, 2])].tolist() == [1, 1]


def test_bytes_are_counted_in_blocks_and_returned(device: Machine) -> None:
    assert torch.cuda.memory_allocated() == 0
    a = torch.zeros(700, dtype=torch.uint8, device="cuda")
    b = a.view(7, 100)[1:]
    assert torch.cuda.memory_allocated() == 1024
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == 700
    assert torch.cuda.memory_allocated(1) == 0
    del a
    gc.collect()
    assert torch.cuda.memory_allocated() == 1024, "the view keeps the memory"
    del b
    gc.collect()
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 1024
    assert torch.cuda.memory_reserved() == 2 << 20
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_memory_is_limited(device: Machine) -> None:
    torch.cuda.set_per_process_memory_fraction(0.5)
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(total // 2 + 1, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == 0


def test_a_graph_repeats_its_kernels_over_the_same_memory(device: Machine) -> None:
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")

    def step() -> None:
        y = x * 3
        out.add_(y.sum())

    graph = capture(step)
    # The warm-up ran, the capture did not.
    assert out.tolist() == [12] * 4
    x.fill_(1.0)
    for _ in range(2):
        graph.replay()
    assert out.tolist() == [36] * 4
    assert device.captures[-1].kernels == ["mul", "sum", "add_"]
    assert device.launches["graph"] == 2


FORBIDDEN: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "a condition": lambda x: bool(x[0] > 0),
    "a copy from the host": lambda x: x + torch.ones(4).to("cuda"),
    "a copy to the host": lambda x: x.cpu(),
    "a copy into a tensor of the host": lambda x: torch.empty(4).copy_(x),
    "a mask": lambda x: x[x > 0],
    "indices of the host": lambda x: x[torch.tensor([1])],
    "nonzero": lambda x: x.nonzero(),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "an event's synchronize": lambda x: torch.cuda.Event().synchronize(),
    "another stream": lambda x: on_another_stream(x),
    "a kernel that was not loaded": lambda x: kernel("new", torch.neg)(x),
}  # fmt: skip


def on_another_stream(x: Tensor) -> Tensor:
    with torch.cuda.stream(torch.cuda.Stream()):
        return x + 1


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_capture_refuses(device: Machine, what: str) -> None:
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    FORBIDDEN[what](x)
    before = device.syncs.total()
    with pytest.raises(CaptureError, match="due to a previous error during capture"), torch.cuda.graph(graph):
        FORBIDDEN[what](x)
    assert device.captures[-1].failure
    assert device.syncs.total() == before + 1, "only torch.cuda.graph's own"
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_waiting_for_the_device_can_be_an_error(device: Machine) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.warns(UserWarning, match="prototype"):
        torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        x.sum().item()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(0)
    assert x.sum().item() == 4


def test_a_capture_needs_a_stream_of_its_own(device: Machine) -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_a_graph_that_reads_freed_memory_is_found_out(device: Machine) -> None:
    inputs = [torch.ones(4, device="cuda")]
    graph = capture(lambda: inputs[0] * 2)
    graph.replay()
    inputs.clear()
    gc.collect()
    with pytest.raises(AssertionError, match="memory that was freed"):
        graph.replay()


def test_a_failed_capture_may_leave_the_allocator_broken() -> None:
    for is_broken in (False, True):
        with simulated_cuda(capture_breaks_allocator=is_broken):
            x = torch.ones(4, device="cuda")
            with pytest.raises(CaptureError), torch.cuda.graph(torch.cuda.CUDAGraph()):
                x.tolist()
            if is_broken:
                with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
                    torch.cuda.empty_cache()
            else:
                torch.cuda.empty_cache()


def test_events_time_the_device_and_not_the_host(device: Machine) -> None:
    x = torch.ones(1 << 20, device="cuda")
    start, end, later = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    x.sum()
    end.record()
    with pytest.raises(RuntimeError, match="device not ready"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) / 1e3 == pytest.approx((4 << 20) / device.bytes_per_second, rel=0.05)
    later.record()
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(torch.cuda.Event())
    before = device.device
    torch.cuda._sleep(1_000_000)
    assert device.device > before + 4e-4


def attend(*allowed: SDPBackend, dtype: torch.dtype = torch.bfloat16, width: int = 64) -> Tensor:
    query, key, value = (torch.randn(2, 4, n, width, device="cuda", dtype=dtype) for n in (1, 33, 33))
    with sdpa_kernel([*allowed]):
        return F.scaled_dot_product_attention(query, key, value)


def test_the_attention_kernel_is_chosen_as_torch_does(device: Machine) -> None:
    flash, efficient, math, cudnn = (
        getattr(SDPBackend, f"{name}") for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")
    )
    attend(flash, efficient, math, cudnn)
    attend(flash, efficient)
    attend(flash, efficient, math, cudnn, dtype=torch.float32)
    attend(math)
    attend(cudnn)
    attend(flash, efficient, width=60)
    assert {name: count for name, count in device.launches.items() if name.startswith("sdpa")} == {
        "sdpa cudnn": 2, "sdpa flash": 2, "sdpa efficient": 1, "sdpa math": 1
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="No available kernel"):
        attend(flash, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="No available kernel"):
        attend(cudnn, width=60)


def test_everything_is_as_before_afterwards() -> None:
    before = {name: getattr(torch.cuda, name) for name in ("is_available", "Stream", "synchronize", "CUDAGraph")}
    with simulated_cuda():
        assert torch.cuda.is_available()
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert not torch.cuda.is_available() or torch.version.cuda

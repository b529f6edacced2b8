"""A simulated CUDA device for tests: CPU tensors that say they are on cuda:0, and enforce CUDA's rules.

With `simulated_cuda()`, `torch.cuda` describes a device, and tensors made on "cuda" are `SimulatedTensor`s. Their
values are computed on the CPU. The simulation

- refuses operations on tensors of different devices;
- counts bytes like the caching allocator, in blocks of 512 bytes, up to the size of the device's memory;
- counts kernel launches and synchronizations, and advances a clock by a roofline;
- captures graphs, and refuses what CUDA refuses during a capture: synchronizing, copies between host and device, work
  on another stream, the first launch of a kernel that must be loaded, and reading memory that was freed since;
- chooses a kernel for `scaled_dot_product_attention`, and refuses shapes that the chosen kernels do not support.

`python -m tests.simulated_cuda MODULE ARGUMENTS...` runs a module on a simulated device. With TRITON_INTERPRET=1, it
has kvcalc's Triton kernels. The device is slow, so that
measurements which repeat a call for some time need few calls.
"""

from tests.simulated_cuda.graphs import CaptureError
from tests.simulated_cuda.kernels import kernel
from tests.simulated_cuda.machine import Machine, is_simulated
from tests.simulated_cuda.runtime import simulated_cuda

__all__ = ["CaptureError", "Machine", "is_simulated", "kernel", "simulated_cuda"]

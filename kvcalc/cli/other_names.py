"""Other tools' names of options, so that the error for an unknown option says the option to type.

They are those of vllm bench serve, SGLang's bench_serving, genai-perf and AIPerf, aiconfigurator, GuideLLM and
llama.cpp, and plain words.
"""

from __future__ import annotations

from collections.abc import Collection

from kvcalc.errors import nearest

# What to type, the first choice first, and the names of others. A command has some of the options.
_NAMES = {
    "--input-tokens | --context": "isl input-len input-length prompt-len prompt-length random-input-len "
    "synthetic-input-tokens-mean input-sequence-length prefill-tokens avg-input-tokens",
    "--output-tokens": "osl output-len output-length random-output-len output-sequence-length gen-len decode-tokens "
    "max-new-tokens synthetic-output-tokens-mean avg-output-tokens",
    "--context | --input-tokens": "ctx ctx-size n-ctx seq-len sequence-length seqlen max-seq-len max-context",
    "--batch | --concurrency": "batch-size bs bsz num-sequences sequences",
    "--concurrency": "users num-users clients streams num-concurrent concurrent-requests max-concurrency",
    "--requests-per-second": "rps qps rate request-rate arrival-rate req-rate",
    "--requests": "num-prompts num-requests request-count n-requests",
    "--dtype": "quant quantization precision bits wbits weights-dtype weight-dtype quantize",
    "--kv-dtype": "kv-cache-type kv-precision kv-quant kv-cache-bits cache-dtype kv-type",
    "--gpu": "gpus device devices hardware system accelerator gpu-type gpu-name card",
    "--gpu h100x16 (two machines)": "nodes num-nodes nnodes machines",
    "--num-gpus": "gpu-count n-gpus ngpus num-devices total-gpus world-size",
    "--gpu-memory": "vram gpu-mem gpu-ram device-memory memory ram",
    "--network": "link interconnect nic fabric network-bandwidth internode-bandwidth infiniband ethernet",
    "--max-ttft": "ttft slo ttft-slo ttft-target first-token-latency",
    "--max-tpot": "tpot itl max-itl tpot-slo itl-target time-per-token",
    "--max-e2e": "e2e latency request-latency max-latency",
    "--engine": "framework runtime server inference-engine",
    "--format csv": "csv",
    "--format tsv": "tsv table",
    "--report page.html": "html output output-file save",
    "--price": "cost price-per-hour gpu-price hourly-cost",
    "--prefix-hit-rate": "hit-rate cache-hit-rate prefix-cache-hit-rate cached prefix-caching",
    "--tp": "tensor-parallelism tp-degree tensor-parallel",
    "--speculative": "num-speculative-tokens draft-tokens spec mtp nextn",
    "MODEL without an option": "model model-path model-id model-name",
}
_CHOICES = {name: choices.split(" | ") for choices, names in _NAMES.items() for name in names.split()}


def hint_for(asked: str, known: Collection[str]) -> str | None:
    """What to type instead of the unknown option `asked`. `known` are the options of the command. None for no idea."""
    for choice in _CHOICES.get(asked.lstrip("-").casefold().replace("_", "-"), ()):
        option = choice.split()[0]
        if option in known or not option.startswith("-"):
            return f"use {choice}"
    return nearest(asked, sorted(option for option in known if option.startswith("--")))

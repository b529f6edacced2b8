"""`kvcalc estimate`: how big is the cache?"""

from typing import Any

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import output_of, question_of
from kvcalc.cli.report import check_report, write_report
from kvcalc.errors import UsageError
from kvcalc.question.question import Question

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """Examples:
  kvcalc estimate llama-3-70b --context 8192
  kvcalc estimate llama-3-70b --context 8k --gpu h100x4 --engine vllm
  kvcalc estimate mistral-7b-v0.1 --context 32k --get kv_cache.total_bytes
  kvcalc estimate deepseek-v3 --context 128k --batch 16 --json
  kvcalc estimate llama-7b --attention gqa --kv-heads 4
  kvcalc estimate --layers 32 --heads 32 --kv-heads 8 --head-dim 128
  kvcalc estimate llama-3-8b --context 8k --kv-memory 40GiB
  kvcalc estimate gpt-oss-120b --context 32k --engine all
  kvcalc estimate llama-3-70b --context 8k --gpu h100x4 --engine vllm --check
  kvcalc estimate llama-3-70b --gpu h100x4 --dtype fp8 --engine vllm --batch 16
  kvcalc estimate qwen3-32b --gpu h200 --engine sglang --input-tokens 2k --output-tokens 500 --concurrency 32
  kvcalc estimate deepseek-v3 --gpu h200x8 --engine vllm --speculative mtp:3 --acceptance-length 2.4
  kvcalc estimate llama-3.1-8b --gpu h100 --engine vllm --context 32k --prefix-tokens 8000 --offload cpu=200GiB
"""


OPTIONS = [
    *o.shared(o.WORKLOAD),
    o.option(
        "engine",
        "Engine whose memory layout to use: transformers, vllm, sglang, tensorrt-llm, llama.cpp or mlx. logical is "
        "the formula; vllm,sglang or all shows several side by side; vllm@0.11 or sglang@0.5.9 is an older release.",
    ),
    *o.shared("kv-memory"),
    o.flag("--check", "Exit with code 4 if it does not fit. Needs --gpu or --kv-memory."),
    o.flag("--strict", "With --check: exit with code 4 also if the fit is tight."),
    *o.shared(o.WHAT_IF),
    o.flag("--variants", "Print the table of MHA, MQA, GQA and MLA even if a device is given."),
    o.flag(
        "--assume-full-attention",
        "For an unrecognised config, print an upper bound: every layer keeps the K and V of all tokens.",
    ),
    *o.shared(f"{o.DEVICE} {o.SPEED} {o.SERVING} {o.PREFIX} {o.SHARED} {o.OFFLOAD} transfer-bandwidth {o.IMAGES}"),
    *o.shared(o.DRAFTING),
    *o.engine_settings(),
    *o.shared(f"layers {o.MODEL_BY_FLAGS} report"),
    *o.output(path="kv_cache.total_bytes"),
]


@app.command(epilog=EPILOG, cls=o.taking(*OPTIONS))
def estimate(ctx: typer.Context, model: o.Model = None) -> None:
    """Compute the size of a model's KV cache.

    With a device, also check whether the model fits and how fast it decodes.
    """
    from kvcalc.errors import DoesNotFitError
    from kvcalc.planning.answers.estimate import answer as ask

    output = output_of(ctx.params)
    check_report(ctx.params)
    question = question_of(ctx.params)
    shown: dict[str, Any] = {"variants": True} if ctx.params["variants"] and not question.asks_several else {}
    if not ctx.params["check"]:
        if ctx.params["strict"]:
            raise UsageError("--strict needs --check", "add --check")
        document, kind = answer(question)
        write_report(ctx, document, kind)
        output.emit(document, kind, **shown)
        return
    if question.devices is None and question.kv_memory_bytes is None:
        raise UsageError("--check needs a device or a memory size", "for example --gpu h100, or --kv-memory 40GiB")
    if question.asks_several:
        raise UsageError("--check needs one engine", "for example --check --engine vllm")
    found = ask(question)
    write_report(ctx, found.document, "estimate")
    output.emit(found.document, "estimate", **shown)
    if not found.fit["fits"] or (ctx.params["strict"] and found.fit["verdict"] == "tight"):
        raise typer.Exit(DoesNotFitError.exit_code)


def answer(question: Question) -> tuple[dict[str, Any], str]:
    """The document that answers a question, and its kind."""
    if question.asks_several:
        from kvcalc.planning.answers.engines import compare_engines

        return compare_engines(question), "engines"
    from kvcalc.planning.answers.estimate import answer as ask

    return ask(question).document, "estimate"

"""`kvcalc prefix`: how much does a bigger prefix cache help?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import devices_of, output_of, question_of, settings_of, tier_rates_of, tier_sizes_of, value_of
from kvcalc.cli.report import check_report, write_report
from kvcalc.errors import UsageError
from kvcalc.units import parse_size, parse_tokens

if TYPE_CHECKING:
    from kvcalc.planning.prefix.cost import Prices
    from kvcalc.question.question import Question

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

# Options that say nothing without a model.
_OF_A_MODEL = ("dtype", "tp", "pp", "kv_memory", "gpu", "gpu_memory", "offload", "price", "calibrate", "cache_memory")


@app.command(cls=o.taking(*o.declared("prefix")))
def prefix(
    ctx: typer.Context,
    trace: Annotated[Optional[str], typer.Argument(metavar="TRACE", help="Trace of requests; - is stdin.")] = None,
    model: o.Model = None,
) -> None:
    """Find how much a bigger prefix cache helps."""
    from kvcalc.cli.counting_bar import counting_bar
    from kvcalc.planning.answers.axis import parse_axis
    from kvcalc.planning.prefix import Sizes, prefix_curve

    given = ctx.params
    output = output_of(given, "prefix")
    check_report(given)
    if trace is None:
        raise UsageError("no TRACE", "for example: kvcalc prefix mooncake.jsonl llama-3.1-8b --gpu h100")
    if trace != "-" and not Path(trace).exists():
        hint = None if model is None else "the trace comes first: kvcalc prefix TRACE MODEL"
        raise UsageError(f"{trace}: No such file or directory", hint)
    if trace == "-" and model == "-":
        raise UsageError("only one of TRACE and MODEL can be read from stdin")
    memory, tokens = given["cache_memory"], given["cache_tokens"]
    if memory is not None and tokens is not None:
        raise UsageError("--cache-memory and --cache-tokens both set the sizes", "use one")
    with counting_bar("requests") as report:
        document = prefix_curve(
            trace,
            _question(given, model),
            sizes=Sizes(
                () if memory is None else parse_axis(memory, "--cache-memory", parse_size),
                () if tokens is None else parse_axis(tokens, "--cache-tokens", parse_tokens),
            ),
            offload=tier_sizes_of(given),
            bandwidths=dict(tier_rates_of(given)),
            prices=_prices(given),
            format=given["trace_format"],
            block_tokens=value_of(given, "trace_block_tokens"),
            most_blocks=value_of(given, "most_blocks"),
            after=value_of(given, "after") or 0.0,
            optimal=given["optimal"],
            report=report,
        )
    write_report(ctx, document, "prefix")
    output.emit(document, "prefix")
    if document["trace"]["num_bad_rows"]:
        raise typer.Exit(1)


def _question(given: Mapping[str, Any], model: str | None) -> Question | None:
    if model is None:
        from kvcalc.engines.options import AUTO_ENGINE

        settings = settings_of(given)
        named = [name for name in _OF_A_MODEL if given[name] is not None]
        named += ["engine"] * (given["engine"] != AUTO_ENGINE) + list(settings)
        if named:
            option = f"--{named[0].replace('_', '-')}"
            raise UsageError(f"{option} needs a MODEL", "for example: kvcalc prefix TRACE llama-3.1-8b --gpu h100")
        return None
    engine = given["engine"].casefold()
    if "," in engine or engine == "all":
        raise UsageError(f"--engine {engine[:60]}: only one engine is supported here", "for example --engine vllm")
    return question_of(given, own="offload offload-bandwidth")


def _prices(given: Mapping[str, Any]) -> Prices:
    """The prices of memory, and of the device of --gpu. UsageError (exit 2) for a price of another device."""
    from kvcalc.planning.prefix.cost import Prices, parse_memory_price

    memory: dict[str, float] = {}
    device, devices = None, devices_of(given)
    if given["price"] is not None and devices is None:
        raise UsageError("--price needs --gpu, because costs are per saved GPU second", "for example --gpu h100")
    for text in o.names_of(given["price"], "--price"):
        price = parse_memory_price(text)
        if price is not None:
            memory[price[0]] = price[1]
            continue
        from kvcalc.planning.plan.document import parse_price

        name, device = parse_price(text)
        if devices is None or devices.gpu.name != name:
            raise UsageError(f"--price {text[:40]}: not the device of --gpu", f"add --gpu {text.partition('=')[0]}")
    return Prices(device, memory)

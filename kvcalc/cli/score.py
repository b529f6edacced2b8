"""`kvcalc score`: how far is the predicted speed from the results of a benchmark?"""

from typing import Annotated, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import calibration_of, devices_of, output_of, settings_of, values_of

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """\
Reads the results of vllm bench serve --save-result, SGLang's bench_serving --output-file, GuideLLM's
benchmarks.json and llama-bench -o json or jsonl. The format is recognised by its content.

The exit code is 0 if at least one run could be compared, however large the error is.

Examples:
  kvcalc score vllm-bench.json --gpu h100
  kvcalc score guidellm.json --model llama-3.1-8b --gpu h100 --engine vllm
  kvcalc score llama-bench.json --json
  kvcalc score vllm-bench.json sglang-bench.jsonl --gpu h100 --get summary.0.mean_error
  kvcalc score vllm-bench.json --gpu h100 --calibrate vllm-bench.json
"""


OPTIONS = [
    o.value("--model", "MODEL", "Model name, config.json or .gguf file. Default: the model that the file names."),
    o.option("engine",
        "Engine that was measured: vllm, sglang, tensorrt-llm or llama.cpp. Default: the engine that the file names.",
        metavar="NAME[@RELEASE]", default=None, several=False),
    o.option("tp",
        "Number of devices that split the heads. Default: the file's, else --num-gpus divided by --pp and --dp."),
    o.option("pp", "Number of pipeline stages. Default: the file's, else 1."),
    o.option("ep",
        "Number of the devices among which whole experts are divided. Default: the file's, else --dp times --tp if "
        "there is a --dp, else 1.", panel=None),
    o.option("dp", "Number of attention replicas. Default: the file's, else 1."),
    o.option("dtype",
        "Type of the weights: bf16, fp16, fp8, int4, nvfp4 and others. Default: the file's, else the config's."),
    o.option("kv-dtype", "Type of the cache. Default: the file's, else the engine's.", default=None),
    *o.shared(f"{o.DEVICE} calibrate"),
    *o.engine_settings(),
    *o.output(path="summary.0.mean_error"),
]  # fmt: skip


@app.command(epilog=EPILOG, cls=o.taking(*OPTIONS))
def score(
    ctx: typer.Context,
    files: Annotated[
        Optional[list[str]], typer.Argument(metavar="FILE...", help="Results of a benchmark; - is stdin.")
    ] = None,
) -> None:
    """Compare the predicted speed with the results of a benchmark."""
    from kvcalc.errors import UsageError
    from kvcalc.model.files import read_stdin, read_text
    from kvcalc.model.resolve import load_model
    from kvcalc.planning.calibration.measured import Given
    from kvcalc.planning.calibration.score import MAX_RESULT_BYTES
    from kvcalc.planning.calibration.score import score as ask

    given, engine = ctx.params, ctx.params["engine"]
    output = output_of(given, "score")
    if not files:
        raise UsageError("no FILE", "for example: kvcalc score vllm-bench.json --gpu h100")
    if [*files, given["model"]].count("-") > 1:
        raise UsageError("only one FILE or --model can be read from stdin")
    if engine is not None and ("," in engine or engine.casefold() == "all"):
        raise UsageError(f"--engine {engine[:60]}: a result is of one engine", "for example --engine vllm")
    document = ask(
        [
            ("stdin", read_stdin(MAX_RESULT_BYTES)) if file == "-" else (file, read_text(file, MAX_RESULT_BYTES))
            for file in files
        ],
        Given(
            model=None if given["model"] is None else load_model(given["model"]),
            devices=devices_of(given),
            engine_settings=settings_of(given),
            calibration=calibration_of(given),
            **values_of(Given, given),
        ),
    )
    output.emit(document, "score")

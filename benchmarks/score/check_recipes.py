"""Ask `kvcalc check` about every command that starts a server in a folder of recipes.

    python benchmarks/score/check_recipes.py FOLDER [--gpu h200x8] [--verified] [--cookbook] [--each]

FOLDER is for example a checkout of vllm-project/recipes. Prints how many commands are answered and how many refused, by
reason. Texts are .md files, and .yaml files with text in them. A script that says devices after its `#` or in the title
above is not read for them: --gpu counts for all. Counted apart are incomplete commands (also those with a variable, a
path or dots in place of the model's name), commands for vLLM-Omni (`--omni`), and recipes for images, speech or
embeddings.

With --verified, the servers are those of models/*/*.yaml in vllm-project/recipes on each machine that is `verified`
there, with the command that src/lib/command-synthesis.js makes for it without features, in the release of the recipe's
image or else of its last update. They should start; but what was verified may have been another variant, another
context or another number of devices. So a server that does not start is counted apart if its weights and one request
alone are larger than the memory that it may use.

With --cookbook, the servers are those of data/models/generated in sgl-project/sgl-cookbook, each on its hardware and in
the release of its folder, or in the newest if that has no class for the model: it came with a later build.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from kvcalc.errors import KvcalcError
from kvcalc.planning.check.answer import check
from kvcalc.planning.check.servers import Server, of_release, servers_in
from kvcalc.releases import Release, parse_release
from kvcalc.throughput.hardware import Devices, find_devices

if TYPE_CHECKING:
    import kvcalc.documents as documents

NO = "does not start"
# Texts in errors about incomplete commands.
_INCOMPLETE = ("$", "No such file", "ends before", "names no model", "stands for a model", '"model": <')
PLACEHOLDER, OTHER, UNKNOWN = "no whole command", "no language model", "model not known"
_BLOCK = re.compile(r"^[ \t]*(`{3,})[^\n]*\n(.*?)^[ \t]*\1", re.MULTILINE | re.DOTALL)


def scripts_in(text: str) -> Iterator[str]:
    """The code blocks of a text."""
    for block in _BLOCK.finditer(text):
        yield block[2]


# Machines in taxonomy.yaml whose name is not kvcalc's. CPUs, TPUs and others that kvcalc has no engine's rules for are
# left out.
_DEVICES = {
    **{name: name for name in ("h20", "h100", "h200", "b200", "b300", "gb200", "gb300", "mi300x", "mi325x", "mi355x")},
    "a100": "a100-80gb", "dgx_station_gb300": "gb300", "dgx_spark_gb10": "gb10", "rtx_5090": "rtx-5090",
    "rtx_5090_2x": "rtx-5090", "rtx_4090_2x": "rtx-4090", "rtx_pro_6000": "rtx-pro-6000",
    "rtx_pro_6000_2x": "rtx-pro-6000", "rtx_pro_6000_8x": "rtx-pro-6000",
}  # fmt: skip
# H20, which taxonomy.yaml does not have.
_UNLISTED = {"brand": "NVIDIA", "generation": "hopper", "gpu_count": 8, "vram_gb": 768}
_BLACKWELL = {"brand": "NVIDIA", "generation": "blackwell"}
_TAG = re.compile(r":v(\d+\.\d+\.\d+)")
_FLAGS = {"tp": "--tensor-parallel-size", "tep": "--tensor-parallel-size", "dep": "--data-parallel-size"}


def verified_in(folder: Path) -> Iterator[tuple[str, str, Server, Devices]]:
    """The name of each recipe and machine, the server, and its devices."""
    machines = yaml.safe_load((folder / "taxonomy.yaml").read_text())["hardware_profiles"]
    for path in sorted(folder.glob("models/*/*.yaml")):
        recipe = yaml.safe_load(path.read_text(errors="replace"))
        if not {"text", "multimodal"} & set(recipe["meta"].get("tasks") or ()):
            continue
        for machine, standing in (recipe["meta"].get("hardware") or {}).items():
            if standing == "verified" and machine in _DEVICES:
                profile = {"id": machine, **machines.get(machine, _UNLISTED)}
                devices = find_devices(f"{_DEVICES[machine]}x{profile['gpu_count']}")
                release = _release(recipe, profile)
                for server in servers_in(_command(recipe, profile)):
                    yield path.stem, machine, of_release(server, release), devices


def _release(recipe: dict[str, Any], profile: dict[str, Any]) -> str | None:
    """The release of the image that the recipe names, or else of its last update, but not below the least one."""
    variant = _variant(recipe, profile)
    own = _of_hardware(variant, "docker_image", profile) or _of_hardware(recipe, "docker_image", profile)
    image = own or variant.get("docker_image") or recipe["model"].get("docker_image") or ""
    if isinstance(image, dict):
        image = image.get(profile["brand"].lower()) or ""
    found = _TAG.search(str(image))
    if found:
        return found[1]
    least, day = str(recipe["model"].get("min_vllm_version")), str(recipe["meta"]["date_updated"])
    if "nightly" in least or "nightly" in str(image) or recipe["model"].get("nightly_required"):
        return None
    then = parse_release("vllm", day).release
    return least if then is None or then < cast(Release, parse_release("vllm", least).release) else day


def cookbook_in(folder: Path) -> Iterator[tuple[str, str, Server, Devices]]:
    """The file and the hardware of each language model's configuration in SGLang's cookbook, its server and devices."""
    for path in sorted(folder.glob("data/models/generated/*/*.yaml")):
        for family in yaml.safe_load(path.read_text())["families"]:
            for model in (one for one in family["models"] if "llm" in one["attributes"]):
                for hardware, asked in (model.get("hardware") or {}).items():
                    for one in asked["configurations"]:
                        engine, name = one["engine"], hardware.lower()
                        devices = find_devices(f"{_DEVICES.get(name, name)}x{engine['tp'] or 1}")
                        for server in servers_in(_launch(one.get("quantized_model_path"), model, engine)):
                            yield path.stem, hardware, of_release(server, path.parent.name[1:]), devices


def _launch(quantized: str | None, model: dict[str, Any], engine: dict[str, Any]) -> str:
    words = ["python", "-m", "sglang.launch_server", "--model-path", quantized or model["model_path"]]
    for name in ("tp", "dp", "ep"):
        words += [f"--{name}", str(engine[name])] if engine[name] else []
    words += ["--enable-dp-attention"] if engine["enable_dp_attention"] else []
    variables = [f"{name}={value}" for name, value in engine["env_vars"].items()]
    return " ".join([*map(shlex.quote, variables), shlex.join([*words, *map(str, engine["extra_args"])])])


def _of_hardware(part: dict[str, Any], fact: str, profile: dict[str, Any]) -> Any:
    return ((part.get("hardware_overrides") or {}).get(profile["id"]) or {}).get(fact)


def _keys(profile: dict[str, Any]) -> list[str]:
    return [profile["id"], profile["generation"], profile["brand"].lower(), "default"]


def _variant(recipe: dict[str, Any], profile: dict[str, Any]) -> dict[str, Any]:
    """The first variant that the machine has memory and kernels for, or else the one that needs the fewest machines.

    `variantRunsOnHardware`. The site offers more machines for a default variant that is too large, or other variants.
    The recipe of Qwen3.8-2.4T says that the smallest one was verified on two machines.
    """
    variants = [*(recipe.get("variants") or {"": {}}).values()]
    offered = [
        one
        for one in variants
        if profile["id"] in (one.get("supported_hardware") or [profile["id"]]) and _runs(one, profile)
    ]
    held = [one for one in offered if (one.get("vram_minimum_gb") or 0) <= profile["vram_gb"]]
    if held and profile.get("scalable", True) is False and held[0] is not variants[0]:
        return max(held, key=lambda one: one.get("vram_minimum_gb") or 0)  # `pickFittingVariant`
    return next(iter(held), min(offered, key=lambda one: one["vram_minimum_gb"], default=variants[0]))


def _runs(variant: dict[str, Any], profile: dict[str, Any]) -> bool:
    """`isPrecisionCompatible`."""
    needed = _BLACKWELL if variant.get("precision") in ("nvfp4", "fp4") else {}
    return all(profile.get(key) == value for key, value in (variant.get("precision_hardware") or needed).items())


def _command(recipe: dict[str, Any], profile: dict[str, Any]) -> str:
    """`resolveCommand` with the default strategy, on as many machines as the variant's memory needs."""
    variant, keys, size = _variant(recipe, profile), _keys(profile), profile["gpu_count"]
    needed = variant.get("vram_minimum_gb") or 0
    nodes = 1
    while nodes * profile["vram_gb"] < needed:
        nodes *= 2  # so that the devices divide the heads
    strategy = recipe.get("default_strategy") or "single_node_tp"
    if nodes > 1:
        strategy = strategy.replace("single_node", "multi_node")
    own = (recipe.get("strategy_overrides") or {}).get(strategy) or {}
    parallel = strategy.split("_")[-1]
    number = size * nodes
    if parallel == "tp" and nodes == 1:
        number = size if needed > profile["vram_gb"] / size or not needed else 1  # `autoFitTp`
        for declared in (own.get("tp"), variant.get("tp")):
            if isinstance(declared, dict):
                declared = next((declared[key] for key in keys if key in declared), None)
            number = min(declared, size) if declared else number

    def of_hardware(part: dict[str, Any], *names: str) -> list[str]:
        overrides = part.get("hardware_overrides") or {}
        return next((overrides[key].get("extra_args") or [] for key in names if key in overrides), [])

    generation = (profile["generation"], profile["brand"].lower())
    words = [*(recipe["model"].get("base_args") or ()), *(variant.get("extra_args") or ())]
    words += of_hardware(variant, profile["id"])
    words += ["--enable-expert-parallel"] if parallel in ("tep", "dep") else []
    words += [_FLAGS.get(parallel, "--tensor-parallel-size"), str(number)]
    if nodes > 1:
        words += ["--data-parallel-size-local", str(size)] if parallel == "dep" else ["--nnodes", str(nodes)]
    words += [*(own.get("extra_args") or ()), *(own.get("vllm_args") or ())]
    if any(key in (own.get("hardware_overrides") or {}) for key in generation):
        words += of_hardware(own, *generation)
    else:
        words += of_hardware(recipe, *generation) + of_hardware(variant, *generation)
    words += of_hardware(own, profile["id"])
    name = variant.get("model_id") or recipe["model"]["model_id"]
    return shlex.join(["vllm", "serve", name, *map(str, words)])


def texts_in(folder: Path, gpu: str) -> Iterator[tuple[str, str, Server | str, Devices]]:
    """The servers in all texts, or why a script is not read."""
    devices = find_devices(gpu)
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".md", ".yaml", ".yml"):
            for script in scripts_in(path.read_text(errors="replace")):
                try:
                    servers: list[Server | str] = [*servers_in(script)]
                except KvcalcError as error:
                    servers = [error.message]
                yield from ((str(path), "", server, devices) for server in servers)


@cache
def is_for_text(path: str) -> bool:
    """Whether a recipe is for text, as far as it says so."""
    if not path.endswith((".yaml", ".yml")):
        return True
    recipe = yaml.safe_load(Path(path).read_text(errors="replace"))
    tasks = {*(recipe.get("meta", {}).get("tasks") or ("text",))} if isinstance(recipe, dict) else {"text"}
    return bool({"text", "multimodal"} & tasks)


def ask(server: Server, devices: Devices) -> documents.Check | KvcalcError:
    """The answer to a command, or why there is none."""
    try:
        return check(server, devices)
    except KvcalcError as error:
        return error


def _is_full(answer: documents.Check) -> bool:
    """Whether the weights and one request alone are larger than the memory that the server may use."""
    fit, share = answer["fit"], (answer["engine"] or {}).get("gpu_memory_utilization") or 1.0
    held = (fit["weights_bytes"] or 0) + fit["kv_cache_bytes"]
    return held > (fit["device_bytes"] or held) * cast(float, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="h200x8")
    parser.add_argument("--each", action="store_true", help="print every refusal")
    parser.add_argument("--verified", action="store_true", help="the servers that are known to start")
    parser.add_argument("--cookbook", action="store_true", help="the servers of SGLang's cookbook")
    asked = parser.parse_args()
    verdicts, reasons, unknown = Counter[str](), Counter[str](), Counter[str]()
    found: Iterator[tuple[str, str, Server | str, Devices]] = texts_in(asked.folder, asked.gpu)
    if asked.verified or asked.cookbook:
        found = verified_in(asked.folder) if asked.verified else cookbook_in(asked.folder)
    for path, machine, server, devices in found:
        verdict, reason, words = "not read", server, ""
        if isinstance(server, Server):
            words = " ".join(server.words)[:200]
            answer = ask(server, devices)
            if asked.cookbook and isinstance(answer, KvcalcError) and "has no class" in answer.message:
                answer = ask(server._replace(release=None), devices)
            if isinstance(answer, KvcalcError):
                is_unknown = "not known" in answer.message or "was not found" in answer.message
                verdict = UNKNOWN if is_unknown else NO if answer.exit_code == 4 else "refused"
                if any(text in answer.message for text in _INCOMPLETE):
                    verdict = PLACEHOLDER
                reason = answer.message
            else:
                verdict = "starts" if answer["starts"] else "does not hold one request" if _is_full(answer) else NO
                reason = answer["reason"] or ""
                unknown.update(answer["command"]["not_counted"])
        if verdict == UNKNOWN and ("--omni" in words or not is_for_text(path)):
            verdict = OTHER
        verdicts[verdict] += 1
        if verdict != "starts":
            reasons[f"{verdict}: {re.sub('[0-9]+', 'N', str(reason)[:110])}"] += 1
            if asked.each:
                print(f"{path} {machine}: {verdict}: {reason}: {words}")
    total = sum(verdicts.values())
    print(f"{total} commands: {', '.join(f'{number} {verdict}' for verdict, number in verdicts.most_common())}")
    named = total - verdicts[PLACEHOLDER] - verdicts[OTHER]
    left = verdicts[UNKNOWN] + verdicts["refused"] + verdicts["not read"]
    print(f"of {named} commands that serve a language model by its name, {left} are not answered: {left / named:.1%}")
    for title, rows in (("why", reasons), ("not counted", unknown)):
        print(f"\n{title}:")
        for text, number in rows.most_common(60):
            print(f"{number:5d}  {text}")


if __name__ == "__main__":
    main()

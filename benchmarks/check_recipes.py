"""Ask `kvcalc check` about every command that starts a server in a folder of recipes.

    python benchmarks/check_recipes.py FOLDER [--gpu h200x8] [--verified] [--each]

FOLDER is for example a checkout of vllm-project/recipes. Prints how many commands are answered and how many refused, by
reason. Texts are .md files, and .yaml files with text in them. A script that says devices after its `#` or in the title
above is not read for them: --gpu counts for all.

With --verified, the servers are those of models/*/*.yaml in vllm-project/recipes on each machine that is `verified`
there: the first variant whose `vram_minimum_gb` the machine has, with the command that src/lib/command-synthesis.js
makes of it. They should start; but what was verified may have been another variant or another number of devices.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kvcalc.errors import KvcalcError
from kvcalc.planning.check.answer import check
from kvcalc.planning.check.servers import Server, servers_of_script
from kvcalc.throughput.hardware import Devices, find_devices

_BLOCK = re.compile(r"^[ \t]*(`{3,})[^\n]*\n(.*?)^[ \t]*\1", re.MULTILINE | re.DOTALL)


def scripts_in(text: str) -> Iterator[str]:
    """The code blocks of a text."""
    for block in _BLOCK.finditer(text):
        yield block[2]


# Machines in taxonomy.yaml -> devices. CPUs, TPUs and others that kvcalc has no engine's rules for are left out.
_MACHINES = {
    **{name: f"{name}x8" for name in ("h20", "h100", "h200", "b200", "b300", "mi300x", "mi325x", "mi355x")},
    "a100": "a100-80gbx8", "gb200": "gb200x4", "gb300": "gb300x4", "dgx_station_gb300": "gb300",
    "dgx_spark_gb10": "gb10",
    "rtx_5090": "rtx-5090", "rtx_5090_2x": "rtx-5090x2", "rtx_4090_2x": "rtx-4090x2", "rtx_pro_6000": "rtx-pro-6000",
    "rtx_pro_6000_2x": "rtx-pro-6000x2", "rtx_pro_6000_8x": "rtx-pro-6000x8",
}  # fmt: skip
_GENERATIONS = {"hopper": "h20 h100 h200", "blackwell": "b200 b300 gb200 gb300", "amd": "mi300x mi325x mi355x"}


def verified_in(folder: Path) -> Iterator[tuple[str, str, Server, Devices]]:
    """The name of each recipe and machine, the server, and its devices."""
    for path in sorted(folder.glob("models/*/*.yaml")):
        recipe = yaml.safe_load(path.read_text(errors="replace"))
        if not {"text", "multimodal"} & set(recipe["meta"].get("tasks") or ()):
            continue
        for machine, standing in (recipe["meta"].get("hardware") or {}).items():
            if standing == "verified" and machine in _MACHINES:
                devices = find_devices(_MACHINES[machine])
                for server in servers_of_script(_command(recipe, machine, devices)):
                    yield path.stem, machine, server, devices


def _command(recipe: dict[str, Any], machine: str, devices: Devices) -> str:
    """`resolveCommand` for the first variant that fits, with the default strategy, on one machine."""
    model, memory = recipe["model"], devices.num_devices * devices.gpu.memory_bytes / 1e9
    variants = [one for one in (recipe.get("variants") or {}).values() if one.get("vram_minimum_gb", 0) <= memory]
    offered = (one for one in variants if machine in one.get("supported_hardware", [machine]))
    variant = next(offered, next(iter((recipe.get("variants") or {"": {}}).values())))
    keys = [machine, *(name for name, machines in _GENERATIONS.items() if machine in machines.split())]
    keys += ["amd" if machine.startswith("mi") else "nvidia", "default"]
    words = [*(model.get("base_args") or ()), *(variant.get("extra_args") or ())]
    for own in (recipe, variant):
        found = next((own["hardware_overrides"][k] for k in keys if k in (own.get("hardware_overrides") or {})), None)
        words += (found or {}).get("extra_args") or ()
    strategy = recipe.get("default_strategy") or "single_node_tp"
    number, size = devices.num_devices, None
    for declared in (
        variant.get("tp"),
        ((recipe.get("strategy_overrides") or {}).get("single_node_tp") or {}).get("tp"),
    ):
        if isinstance(declared, dict):
            declared = next((declared[key] for key in keys if key in declared), None)
        size = size or declared
    if size is None:
        fits = (variant.get("vram_minimum_gb") or 10**6) <= devices.gpu.memory_bytes / 1e9
        size = 1 if fits else number
    if strategy == "single_node_dep":
        words += ["--data-parallel-size", str(number), "--enable-expert-parallel"]
    elif not any(word in words for word in ("--tensor-parallel-size", "-tp")):
        words += ["--tensor-parallel-size", str(number if strategy == "single_node_tep" else min(size, number))]
        words += ["--enable-expert-parallel"] if strategy == "single_node_tep" else []
    name = variant.get("model_id") or model["model_id"]
    return shlex.join(["vllm", "serve", name, *map(str, words)])


def texts_in(folder: Path, gpu: str) -> Iterator[tuple[str, str, Server | str, Devices]]:
    """The servers in all texts, or why a script is not read."""
    devices = find_devices(gpu)
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".md", ".yaml", ".yml"):
            for script in scripts_in(path.read_text(errors="replace")):
                try:
                    servers: list[Server | str] = [*servers_of_script(script)]
                except KvcalcError as error:
                    servers = [error.message]
                yield from ((str(path), "", server, devices) for server in servers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="h200x8")
    parser.add_argument("--each", action="store_true", help="print every refusal")
    parser.add_argument("--verified", action="store_true", help="the servers that are known to start")
    asked = parser.parse_args()
    verdicts, reasons, unknown = Counter[str](), Counter[str](), Counter[str]()
    found: Iterator[tuple[str, str, Server | str, Devices]] = texts_in(asked.folder, asked.gpu)
    for path, machine, server, devices in verified_in(asked.folder) if asked.verified else found:
        verdict, reason, words = "not read", server, ""
        if isinstance(server, Server):
            words = " ".join(server.words)[:200]
            try:
                answer = check(server, devices)
            except KvcalcError as error:
                is_unknown = "not known" in error.message or "No such file" in error.message
                verdict = "model not known" if is_unknown else "does not start" if error.exit_code == 4 else "refused"
                reason = error.message
            else:
                verdict, reason = "starts" if answer["starts"] else "does not start", answer["reason"] or ""
                unknown.update(answer["command"]["not_counted"])
        verdicts[verdict] += 1
        if verdict != "starts":
            reasons[f"{verdict}: {re.sub('[0-9]+', 'N', str(reason)[:110])}"] += 1
            if asked.each:
                print(f"{path} {machine}: {verdict}: {reason}: {words}")
    total = sum(verdicts.values())
    print(f"{total} commands: {', '.join(f'{number} {verdict}' for verdict, number in verdicts.most_common())}")
    for title, rows in (("why", reasons), ("not counted", unknown)):
        print(f"\n{title}:")
        for text, number in rows.most_common(60):
            print(f"{number:5d}  {text}")


if __name__ == "__main__":
    main()

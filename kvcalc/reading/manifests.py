"""The containers in compose files, in manifests of Kubernetes and in values of Helm charts."""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from kvcalc.errors import UsageError
from kvcalc.reading.command import Command, unknown
from kvcalc.reading.containers import variables_of, variables_of_file, written
from kvcalc.reading.documents import read_documents

# Keys of a resource's limits that count devices (device plugins of NVIDIA and AMD).
_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)(?:(:?)([-+?])([^{}]*))?\})")
_REFERENCE = re.compile(r"\$(?:(\$)|\((\w+)\))")
# Keys of vLLM's settings that are no options (helm/templates/deployment-vllm-multi.yaml, production-stack).
_NO_OPTIONS = ("extraArgs", "v0", "v1", "prometheusMultiprocDir")
# What KServe and the chart start.
_SERVE = "vllm serve".split()
# Options of KServe's server that are none of vLLM (python/huggingfaceserver, kserve).
_KSERVE = ("--model_name", "--model-name", "--model_dir", "--backend", "--task")


def commands_in_manifest(text: str, files: Mapping[str, str]) -> list[Command]:
    """The command of every container in YAML. Empty if the text is no manifest."""
    documents = read_documents(text)
    configs = {
        str(_within(document, "metadata", "name")): {str(key): written(value) for key, value in data.items()}
        for document in documents
        if document.get("kind") in ("ConfigMap", "Secret")
        and isinstance(data := document.get("data") or document.get("stringData"), dict)
    }
    # A mounted ConfigMap has a file for each key.
    files = {**files, **{name: data for config in configs.values() for name, data in config.items()}}
    return [
        command._replace(files=files) for document in documents for command in _in_document(document, files, configs)
    ]


def interpolated(text: str, variables: Mapping[str, str], *, unset: str | None = None) -> str:
    """A text with its variables, as compose and Dockerfiles write them. `unset` is the value of others, None: unknown.

    $$ is a dollar sign, and ${NAME:-x}, ${NAME-x} and ${NAME:+x} are as in a shell (compose-spec, 12-interpolation.md).
    """

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        assigned = variables.get(match[2] or match[3])
        has_value = bool(assigned) if match[4] else assigned is not None
        if match[5] == "+":
            return match[6] if has_value else ""
        if match[5] == "-" and not has_value:
            return match[6]
        return assigned if assigned is not None else unknown(match[0]) if unset is None else unset

    for _ in range(3):  # a default may have a variable with a default
        if "${" not in text or _VARIABLE.search(text) is None:
            break
        before, text = text, re.sub(r"\$\{\w+:?-[^{}$]*\}", lambda match: _VARIABLE.sub(value, match[0]), text)
        if text == before:
            break
    return _VARIABLE.sub(value, text)


def _in_document(
    document: Mapping[str, Any], files: Mapping[str, str], configs: Mapping[str, Mapping[str, str]]
) -> Iterator[Command]:
    services, rows = document.get("services"), _within(document, "servingEngineSpec", "modelSpec")
    if isinstance(services, dict):
        for name, service in services.items():
            base = services.get(_within(service, "extends", "service"))
            if isinstance(service, dict):
                yield _of_service(str(name), {**(base if isinstance(base, dict) else {}), **service}, files)
        return
    if isinstance(rows, list):
        yield from (_of_chart(row) for row in rows if isinstance(row, dict))
        return
    title, size = _within(document, "metadata", "name"), _within(document, "spec", "leaderWorkerTemplate", "size")
    for container in _containers(document):
        name = title or container.get("name")
        command = _of_container(container, configs)._replace(name=None if name is None else str(name))
        if type(size) is int and command.num_devices is not None and "--nnodes" not in command.words:
            command = command._replace(num_devices=command.num_devices * size)
        yield command


def _of_service(name: str, service: Mapping[str, Any], files: Mapping[str, str]) -> Command:
    """A service of a compose file."""
    beside = variables_of_file(".env", files, []) if ".env" in files else {}

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(item) for item in value]
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        return interpolated(value, beside) if isinstance(value, str) else value

    unread: list[str] = []
    paths = replaced(service.get("env_file"))
    environment: dict[str, str] = {}
    for path in paths if isinstance(paths, list) else [paths]:
        path = path.get("path") if isinstance(path, dict) else path
        environment |= variables_of_file(path, files, unread) if isinstance(path, str) else {}
    entry, words = (replaced(service.get(key)) for key in ("entrypoint", "command"))
    image, has_entry = service.get("image"), entry is not None
    return Command(
        [*_words(entry), *_words(words)], {**environment, **variables_of(replaced(service.get("environment")))}, {},
        None if image is None else written(replaced(image)), has_entry and entry != [], name, _reserved(service),
        unread=tuple(unread), fault=_typed("command", words) or _typed("entrypoint", entry),
    )  # fmt: skip


def _words(value: Any) -> list[str]:
    """The words of a command of compose, which splits a text as a shell does. UsageError (exit 2) for an open quote."""
    if isinstance(value, str):
        try:
            return shlex.split(value.replace("\\\n", " "))
        except ValueError:
            raise UsageError(f"{value[:40]!a}: an unclosed quote") from None
    return [written(word) for word in value] if isinstance(value, list) else []


def _typed(key: str, values: Any) -> str:
    """Why a list is refused: words are texts, and no numbers or mappings."""
    word = next((word for word in values if not isinstance(word, str)), None) if isinstance(values, list) else None
    return "" if word is None else f"{key}: {written(word)[:40]} is not a text; put it in quotes"


def _reserved(service: Mapping[str, Any]) -> int | None:
    """The devices that a service reserves (deploy.md of the compose specification)."""
    rows = _within(service, "deploy", "resources", "reservations", "devices") or service.get("gpus")
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict):
            if isinstance(row.get("device_ids"), list) and row["device_ids"]:
                return len(row["device_ids"])
            if type(row.get("count")) is int:
                return _number(row["count"])  # -1 stands for all
    return None


def _of_container(container: Mapping[str, Any], configs: Mapping[str, Mapping[str, str]]) -> Command:
    """A container of a Pod."""
    environment: dict[str, str] = {}
    faults = [_typed(key, container.get(key)) for key in ("command", "args")]
    for row in _rows(container.get("envFrom")):
        source = _within(row, "configMapRef", "name") or _within(row, "secretRef", "name")
        environment |= {f"{row.get('prefix') or ''}{key}": text for key, text in configs.get(str(source), {}).items()}
    for row in (row for row in _rows(container.get("env")) if "name" in row):
        source = _within(row, "valueFrom", "configMapKeyRef") or _within(row, "valueFrom", "secretKeyRef")
        value = row.get("value", "")
        if "valueFrom" in row:
            value = configs.get(str(_within(source, "name")), {}).get(str(_within(source, "key")))
            if value is None:
                value = unknown(f"$({row['name']})")
        environment[str(row["name"])] = resolved(written(value), environment)
    limits = _within(container, "resources", "limits")
    counts = [limits[key] for key in _RESOURCES if key in limits] if isinstance(limits, dict) else []
    command, words = ([written(word) for word in _list(container.get(key))] for key in ("command", "args"))
    words = [resolved(word, environment) for word in (*command, *words)]
    model = container.get("modelFormat")
    if isinstance(model, dict):
        words, command = _of_kserve(container, words), _SERVE
    image = container.get("image")
    return Command(
        words, environment, {}, written(image) if image else None, bool(command), None,
        _number(counts[0]) if counts else None, fault=next((fault for fault in faults if fault), ""),
        unread=("KServe's release of vLLM",) if isinstance(model, dict) else (),
    )  # fmt: skip


def _of_kserve(model: Mapping[str, Any], words: list[str]) -> list[str]:
    """The words of vLLM behind KServe's server for Hugging Face's models."""
    place, rest = written(model.get("storageUri")).removeprefix("hf://"), list[str]()
    pairs = iter(words)
    for word in pairs:
        option, equals, value = word.partition("=")
        if option in (*_KSERVE, "--model_id", "--model-id"):
            value = value if equals else next(pairs, "")
            place = value if option.endswith("id") else place
        else:
            rest.append(word)
    return [*_SERVE, *([place] if place else []), *rest]


def _of_chart(row: Mapping[str, Any]) -> Command:
    """A model in the values of vLLM's chart (helm/templates/deployment-vllm-multi.yaml, production-stack)."""
    words = [*_SERVE, written(row.get("modelURL"))]
    settings = row.get("vllmConfig")
    settings = dict(settings) if isinstance(settings, dict) else {}
    if settings:
        settings.setdefault("enablePrefixCaching", False)
    for key, value in settings.items():
        option = re.sub(r"(?<!^)([A-Z])", r"-\1", str(key)).lower()
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif key not in _NO_OPTIONS:
            words += [f"--{option}", written(value)]
    words += ["--enable-lora"] if row.get("enableLoRA") else []
    words += [written(word) for word in _list(settings.get("extraArgs"))]
    if _within(row, "lmcacheConfig", "enabled"):
        words += ["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}']
    image = ":".join(written(row.get(key)) for key in ("repository", "tag") if row.get(key))
    environment = {
        str(variable["name"]): written(variable.get("value"))
        for variable in _rows(row.get("env"))
        if "name" in variable
    }
    return Command(
        words, environment, {}, image or None, name=row.get("name") and str(row["name"]),
        num_devices=_number(row.get("requestGPU")),
    )  # fmt: skip


def _containers(document: Any) -> Iterator[Mapping[str, Any]]:
    """Every container in a manifest or in values of a chart, wherever its kind of resource has it."""
    nodes = deque([document])
    while nodes:
        node = nodes.popleft()
        if isinstance(node, dict):
            containers, image = node.get("containers"), node.get("image")
            yield from _rows(containers)
            if isinstance(image, dict) and isinstance(image.get("repository"), str):
                text = ":".join(written(image[key]) for key in ("repository", "tag") if image.get(key))
                words = {key: node.get(key) or image.get(key) for key in ("command", "args")}
                yield {**node, **words, "image": text, "args": words["args"] or node.get("extraArgs")}
            if isinstance(node.get("modelFormat"), dict):
                yield node
            nodes += [value for key, value in node.items() if key not in ("containers", "initContainers")]
        elif isinstance(node, list):
            nodes += node


def resolved(word: str, variables: Mapping[str, str]) -> str:
    """A word with the container's variables, which Kubernetes writes as $(NAME). $$ is a dollar sign."""
    return _REFERENCE.sub(lambda match: "$" if match[1] else variables.get(match[2], match[0]), word)


def _within(value: Any, *keys: str) -> Any:
    """The value below the keys of nested mappings, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in _list(value) if isinstance(row, dict)]


def _number(value: Any) -> int | None:
    """A number of devices in a text or in YAML, or None."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 7 and int(text) else None

"""The facts that a start command is made from, and the interface of an engine's command.

An engine that kvcalc can start has a module `command` in its folder, with a `StartCommand` named `COMMAND`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from kvcalc.engines.declarations import OPTIONS, Option
from kvcalc.model.layout import Layout
from kvcalc.records import NamedTuple
from kvcalc.releases import Release, release_of

PREFILL, DECODE, ROUTER, NODE, REPLICA = "prefill", "decode", "router", "node", "replica"
ROLES = (PREFILL, DECODE, ROUTER)
PORT = 8000
LISTENING = ("--host", "0.0.0.0", "--port", str(PORT))  # noqa: S104 - clients are on other machines
# Which replica gets a request -> --policy of the routers of vLLM and SGLang (RouterArgs, router_args.py of vllm-router
# 0.1.17 and sglang-router 0.3.2). Neither sends it to the one with the fewest requests of all.
_POLICIES = {"round-robin": "round_robin", "random": "random", "prefix-aware": "cache_aware"}
# kvcalc's name for a type with 16 or 32 bits -> the name in PyTorch.
_FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Checkpoint(NamedTuple):
    """What a command loads.

    `name` is a repository on the Hugging Face Hub, a folder, a GGUF file or a placeholder in angle brackets.
    `revision` is the repository's revision, or None for its default. `dtype` is the type to which the command makes the
    engine convert the weights, or None to keep their type. `note` is a remark for the user, or None.
    """

    name: str
    revision: str | None = None
    dtype: str | None = None
    note: str | None = None

    @property
    def torch_dtype(self) -> str | None:
        """The name of `dtype` in PyTorch, which vLLM, SGLang and TensorRT-LLM use."""
        return None if self.dtype is None else _FLOATS[self.dtype]


class Drafting(NamedTuple):
    """A method of `kvcalc.model.drafting`, the tokens drafted per step, and the checkpoint that drafts them, or None.

    The model itself drafts with its MTP layers, and n-grams need no weights.
    """

    method: str
    num_tokens: int
    checkpoint: str | None


class ServerArguments(NamedTuple):
    """How a replica is started: it runs at most `max_running` requests at once, none longer than `context_tokens`.

    None leaves either to the engine. `layout` says how the replica is split. `settings` are the engines' own options by
    name. `beyond_limit` is true if the context exceeds the model's limit. `drafting` says how tokens are drafted, or is
    None if they are not. `engine` is the engine of the plan, whose release its command has to suit; other engines'
    commands suit their newest stable release. `prompt_division` is how copies of the attention divide a prompt
    (`Engine.prompt_division`).
    """

    layout: Layout
    context_tokens: int | None
    max_running: int | None
    kv_dtype: str
    settings: Mapping[str, str]
    beyond_limit: bool = False
    drafting: Drafting | None = None
    engine: str = ""
    prompt_division: str | None = None

    def has_release(self, engine: str, since: Release) -> bool:
        """Whether the command's engine is `since` or newer."""
        is_own = self.engine.partition("@")[0] == engine
        release = release_of(self.engine if is_own else engine)
        return release is None or release >= since

    @property
    def running_of_rank(self) -> int | None:
        """The requests of one DP rank."""
        return None if self.max_running is None else self.layout.attention_batch(self.max_running)

    def options(self, engine: str, words: Sequence[str], without: Iterable[str] = ()) -> list[Option]:
        """The options of `engine` that were given, but not those in `without` or among the `words` of the command."""
        return [
            option for option in OPTIONS[engine]
            if option.name in self.settings and option.name not in without and f"--{option.name}" not in words
        ]  # fmt: skip

    def flags(
        self, sizes: tuple[str, ...], checkpoint: Checkpoint, more: Sequence[str], cache_types: Mapping[str, str]
    ) -> list[str]:
        """The flags of vLLM and SGLang for a checkpoint and these arguments, without the engine's own options.

        `sizes` are the names for the tensor-parallel size, the number of stages, the context and the running requests.
        One rank and one stage need no flag. `more` are the flags for
        DP ranks. `cache_types` has the engine's names of the cache's types that are not its default.
        """
        known = [(name, size) for name, size in zip(sizes, (*self.layout[:2], *self[1:3])) if size is not None]
        given = [(name, str(size)) for name, size in known if name not in sizes[:2] or size != 1]
        flags = [] if checkpoint.revision is None else ["--revision", checkpoint.revision]
        flags += [word for pair in given for word in pair] + [*more]
        flags += [] if checkpoint.torch_dtype is None else ["--dtype", checkpoint.torch_dtype]
        return flags + (["--kv-cache-dtype", cache_types[self.kv_dtype]] if self.kv_dtype in cache_types else [])


class Pools(NamedTuple):
    """What the commands of separate instances are made for: the arguments and the numbers for PREFILL and DECODE.

    `buffer_tokens` are those of a transfer buffer.
    """

    checkpoint: Checkpoint
    arguments: Mapping[str, ServerArguments]
    instances: Mapping[str, int]
    buffer_tokens: int

    def hosts(self, role: str) -> list[str]:
        """The host and port of each instance of a role."""
        return [f"{host_of(role, number)}:{PORT}" for number in range(self.instances[role])]

    def router_flags(self, after_prefill: Sequence[str] = ()) -> list[str]:
        """The flags of a router of vLLM or SGLang. `after_prefill` are words after each prefill URL."""
        words = ["--policy", "round_robin"]  # the plan assumes that instances are asked in turn
        for host in self.hosts(PREFILL):
            words += ["--prefill", f"http://{host}", *after_prefill]
        for host in self.hosts(DECODE):
            words += ["--decode", f"http://{host}"]
        return [*words, *LISTENING]


class StartCommand(ABC):
    """How an engine is started as a server, on bare metal and in a container.

    `image` is the one that the engine's project publishes for NVIDIA's devices, in the release whose options are
    printed. None if the user must name one: AMD's have a tag for every kind of device and version of ROCm.
    """

    program: str  # the name of its command in `kvcalc plan --emit`
    image: str | None = None
    health_path = "/health"  # answers when the server is ready (vLLM, SGLang, trtllm-serve and llama-server alike)
    router_package: str | None = None  # on PyPI, with the router of replicas and of separate instances
    router_program: tuple[str, ...] = ()  # starts the router of the package
    rank_option = (
        ""  # for the number of a machine, if several run one replica and their commands differ in nothing else
    )
    address_variable: str | None = None  # in which a prefill instance says its address

    @abstractmethod
    def words(self, checkpoint: Checkpoint, arguments: ServerArguments) -> list[str] | None:
        """The words of the command for one replica, variables first. None if the engine has no such layout."""

    def across(self, words: list[str], arguments: ServerArguments, nodes: int) -> list[str] | None:
        """The words for the first of `nodes` machines that run one replica. None if the engine has no such layout."""
        return None

    def on_machines(self, checkpoint: Checkpoint, arguments: ServerArguments, machine_devices: int) -> list[str] | None:
        """The words for one replica on machines with so many devices: for the first of them, if it needs several."""
        words, nodes = self.words(checkpoint, arguments), -(-arguments.layout.num_devices // machine_devices)
        return words if words is None or nodes == 1 else self.across(words, arguments, nodes)

    def node_words(self, words: list[str]) -> list[list[str]]:
        """The words for each machine of a replica, given those of the first. One if that starts the others."""
        return [words]

    def router_words(self, router: str, hosts: Sequence[str]) -> list[str] | None:
        """The words of the command of a `router` (`question.fields.ROUTERS`) in front of replicas on these hosts.

        None if the engine's project has no such router.
        """
        if not self.router_program or router not in _POLICIES:
            return None
        urls = [f"http://{host}:{PORT}" for host in hosts]
        return [*self.router_program, "--policy", _POLICIES[router], "--worker-urls", *urls, *LISTENING]

    def pool_words(self, pools: Pools) -> dict[str, list[str]]:
        """The words of the command of each of `ROLES`. Instances of a role differ in the name of their machine only.

        Empty if the engine has no separate prefill and decode instances (`Engine.disaggregation`).
        """
        return {}


def value_of(words: Sequence[str], option: str) -> str | None:
    """The value of an option in a command. None if it is not there."""
    return words[words.index(option) + 1] if option in words else None


def with_value(words: Sequence[str], option: str, value: str) -> list[str]:
    """The command with another value of an option that it has."""
    place = words.index(option) + 1
    return [*words[:place], value, *words[place + 1 :]]


def host_of(role: str, number: int) -> str:
    """The name of an instance's machine in the commands."""
    return f"{role}-{number}"

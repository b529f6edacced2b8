"""`kvcalc check --advise`: the words that a change makes, the limit that binds, and the search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvcalc.engines.declarations import has_table, table
from kvcalc.engines.reading import readers
from kvcalc.errors import UsageError
from kvcalc.planning.check import advice as advice_module
from kvcalc.planning.check import answer as answers
from kvcalc.planning.check.advice import Change, advise, changed
from kvcalc.planning.check.servers import Server, servers_in

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def server_of(command: str) -> Server:
    (server,) = servers_in(command)
    return server


def answered(rate: float | None, free: int = 10, running: int = 16, fitting: int = 120, **more: Any) -> Any:
    """The parts of a check document that advice reads."""
    requests = {
        "input_tokens": 2000, "output_tokens": 500, "max_requests": running, "memory_requests": fitting,
        "refused": None,
    }  # fmt: skip
    engine = {
        "tensor_parallel_size": 2, "data_parallel_size": 1, "pipeline_parallel_size": 1, "max_num_seqs": running,
    }  # fmt: skip
    capacity = None if rate is None else {"requests_per_second": rate, "max_running_requests": running}
    return {
        "starts": True, "reason": None, "requests": requests, "engine": engine, "capacity": capacity,
        "command": {"engine": "vllm"}, "server": {"starts": more.get("starts", True)},
        "fit": {"fits": True, "verdict": "fits", "free_bytes": free, "max_context_tokens": 32768}, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("vllm serve a/b --max-num-seqs 16 -tp 2", {"max-num-seqs": "64"}, "a/b -tp 2 --max-num-seqs 64"),
        ("vllm serve a/b --max-num-seqs=16 -tp 2", {"max-num-seqs": None}, "a/b -tp 2"),
        ("vllm serve a/b --max_num_seqs 16", {"max-num-seqs": None}, "a/b"),
        ("vllm serve a/b --enforce-eager --seed 1", {"enforce-eager": None}, "a/b --seed 1"),
        ("vllm serve a/b -tp 8", {"tensor-parallel-size": "4", "data-parallel-size": "2"},
         "a/b --tensor-parallel-size 4 --data-parallel-size 2"),
        ("vllm serve a/b", {"enable-expert-parallel": True}, "a/b --enable-expert-parallel"),
        ("vllm serve a/b --served-model-name x y --max-num-seqs 4", {"max-num-seqs": None},
         "a/b --served-model-name x y"),
        ("vllm serve a/b --no-enable-prefix-caching", {"enable-prefix-caching": True}, "a/b --enable-prefix-caching"),
        ("vllm serve a/b --served-model-name x y", {"served-model-name": None}, "a/b"),
        ("python -m sglang.launch_server --model a/b --tp 2", {"dp-size": "2", "enable-dp-attention": True},
         "--model a/b --tp 2 --dp-size 2 --enable-dp-attention"),
        ("llama-server -hf a/b -np 4 -c 8192", {"parallel": "8"}, "-hf a/b -c 8192 --parallel 8"),
    ],
)  # fmt: skip
def test_a_change_replaces_every_spelling_of_its_options(command: str, options: Any, words: str) -> None:
    server = server_of(command)
    assert changed(server, server.words, options) == words.split()


def test_the_declared_options_are_the_engines_own() -> None:
    """A change with another name would be refused by the engine, and then tried in vain."""
    for reader in readers():
        if not has_table(reader.engine, "advice"):
            continue
        for row in table(reader.engine, "advice")["changes"]:
            names = [
                row["option"],
                *row.get("with", {}),
                *row.get("drops", ()),
                *([row["layouts"]] if "layouts" in row else []),
            ]
            own = {argument.name for argument, _ in reader.arguments.spelled.values()}
            assert set(names) <= own, (reader.engine, names)
            assert row["risk"]


def test_the_limit_that_binds() -> None:
    server = server_of(f"vllm serve {LLAMA} --max-num-seqs 16")

    def binds(base: Any) -> str:
        return advise(server, base, lambda servers, least: [None] * len(servers))["binds"]

    assert binds(answered(1.0)) == "--max-num-seqs 16 binds: 16 of 120 requests that fit"
    assert binds(answered(1.0, running=120)) == "the memory binds: 120 requests of this length fit"
    base = answered(1.0, running=64)
    base["engine"]["max_num_seqs"] = 256
    assert binds(base) == "the speed binds: at most 64 of 120 requests that fit run at once"
    assert binds(answered(None, starts=False, reason="too large")) == "too large"


def test_the_search_takes_the_best_change_and_goes_on_until_nothing_gains() -> None:
    server = server_of(f"vllm serve {LLAMA} --max-num-seqs 16 --enforce-eager --gpu-memory-utilization 0.7")
    least_rates = list[float]()

    def judge(servers: Sequence[Server], least: float) -> list[Any]:
        least_rates.append(least)
        found = list[Any]()
        for each in servers:
            words = " ".join(each.words)
            lifts = "--max-num-seqs 16" not in words
            # The memory is worth something only when more requests may run.
            rate = 1.0 + 2 * lifts + (0.5 * lifts if "--gpu-memory-utilization 0.7" not in words else 0)
            found.append(None if "tensor-parallel" in words else answered(rate if rate >= least else None))
        return found

    advice = advise(server, answered(1.0), judge)
    assert advice["improved"] is not None
    assert advice["improved"]["command"] == f"vllm serve {LLAMA} --enforce-eager"
    assert advice["improved"]["gain"] == pytest.approx(2.5)
    assert advice["improved"]["changes"] == ["without --max-num-seqs", "without --gpu-memory-utilization"]
    assert len(advice["improved"]["risks"]) == 2
    assert least_rates == pytest.approx([1.03, 3.09, 3.605])
    gains = {row["change"]: row["gain"] for row in advice["changes"]}
    assert gains["without --max-num-seqs"] == pytest.approx(2.0)
    assert gains["without --enforce-eager"] == 0
    assert not [change for change in gains if "tensor-parallel" in change]


def test_a_change_is_typed_as_its_options() -> None:
    assert Change({"max-num-seqs": "64"}, "").text == "--max-num-seqs 64"
    assert Change({"enforce-eager": None}, "").text == "without --enforce-eager"
    assert Change({"dp-size": "2", "enable-dp-attention": True}, "").text == "--dp-size 2 --enable-dp-attention"


def test_advice_in_a_terminal(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two running requests are the limit of this server. Runs are short here, and few changes are tried."""
    changes = [row for row in table("vllm", "advice")["changes"] if row["option"] in ("max-num-seqs", "enforce-eager")]
    monkeypatch.setattr(advice_module, "table", lambda engine, name: {"changes": changes})
    monkeypatch.setattr(answers, "_REQUESTS", 60)
    monkeypatch.setattr(answers, "_LONG_SECONDS", 1)
    options = ("--gpu", "h100", "--input-tokens", "128", "--output-tokens", "16", "--advise", "--jobs", "1")
    command = ("--", "vllm", "serve", LLAMA, "--max-num-seqs", "2", "--max-model-len", "4096")
    shown = kvcalc("check", *options, "--format", "human", *command)
    assert shown.status == 0, shown.err
    assert "advice: --max-num-seqs 2 binds: 2 of " in shown.out
    found = kvcalc("check", *options, "--json", *command).json
    improved = found["advice"]["improved"]
    assert "--max-num-seqs 2" not in improved["command"]
    assert improved["gain"] > 1
    assert improved["capacity"]["requests_per_second"] > 2 * found["capacity"]["requests_per_second"]
    again = kvcalc("check", *options[:-3], "--json", "--", *improved["command"].split())
    assert again.json["capacity"] == improved["capacity"]
    assert kvcalc("check", *options[:2], "--json", *command).json["advice"] is None
    without = kvcalc("check", *options[:2], "--advise", *command)
    assert without.status == 2
    assert "--advise needs the lengths of requests" in without.err


def test_an_engine_without_declared_changes_is_refused() -> None:
    server = server_of("mlx_lm.server --model mlx-community/Qwen3-4B-4bit")
    with pytest.raises(UsageError, match="--advise: no changes are known for mlx-lm"):
        advise(server, answered(1.0), lambda servers, least: [])

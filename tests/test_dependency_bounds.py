"""The bounds of the dependencies, which .ci/run installs."""

from __future__ import annotations

from tests.dependency_bounds import lowest, requirements


def test_every_dependency_has_a_lowest_release() -> None:
    pins = [lowest(one) for one in requirements()]
    names = [pin.partition("==")[0] for pin in pins]
    assert names[:3] == ["typer", "rich", "pyyaml"]
    assert {"psutil", "huggingface_hub", "matplotlib", "gguf"} <= set(names)
    assert len(set(names)) == len(names)


def test_typer_has_the_module_that_kvcalc_imports() -> None:
    """typer.exceptions is new in 0.27.2."""
    (pin,) = (lowest(one) for one in requirements() if one.startswith("typer"))
    assert tuple(map(int, pin.partition("==")[2].split("."))) >= (0, 27, 2)

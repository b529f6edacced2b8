"""The documents of `models` and `gpus`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from kvcalc.documents.fields import Amount, Count, Whole
from kvcalc.documents.parts import DeviceFigures, Document, Hardware


class ModelsModelsItem(TypedDict):
    """one preset"""

    name: str
    family: str | None
    attention: str
    num_layers: Whole
    num_attention_heads: Whole | None
    num_kv_heads: Whole | None
    head_dim: Whole | None
    sliding_window: Whole | None
    max_position_embeddings: Whole | None
    parameters: Count | None
    """null if the weights are not counted"""
    weights_bytes: Count | None
    """the weights as they are published"""
    bytes_per_token_16_bit: Whole
    """what a token adds to an empty cache of 16 bits, before windows are full"""
    kv_dtype: str
    """the type of the cache in the next three keys: the one of kvcalc estimate without options"""
    context_tokens: Count
    """the context at which a token adds bytes_per_token: that of kvcalc estimate without options"""
    bytes_per_token: Whole
    """what one more token adds at context_tokens"""
    fixed_bytes_per_sequence: Whole
    """what does not grow with the context, such as full windows and states"""
    aliases: list[str]
    source: str
    date: str
    file: str | None


class Models(Document):
    """kvcalc models"""

    models: list[ModelsModelsItem]


class ModelsFitModelsItem(TypedDict):
    """one model that fits"""

    name: str
    family: str | None
    engine: str
    parameters: Count
    active_parameters_per_token: Whole | None
    dtype: str | None
    """the best type of the weights with which the workload fits: the published one, or the first smaller one"""
    weights_bytes: Count | None
    free_bytes: int
    """what is left on a device with this workload"""
    context_tokens: Count
    """that of the workload: the longest that surely fits, if none was asked for"""
    max_context_tokens: Whole | None
    """at this batch, and no more than the model takes; null if neither sets a limit"""
    max_batch_size: Whole | None
    """at this context; null if neither memory nor the engine sets a limit"""
    decode_tokens_per_second: Amount | None
    """tokens per second of the whole batch; null if the speed is not known"""
    prefill_seconds: Amount | None


class ModelsFitEngine(TypedDict):
    """the engine that runs them; null if they have several"""

    name: str
    version: str | None


class ModelsFit(Document):
    """kvcalc models with a device"""

    hardware: Hardware | None
    """null if no model fits"""
    engine: ModelsFitEngine | None
    """null if no model fits"""
    context_tokens: Count | None
    """null if each model has the context of kvcalc estimate without options"""
    batch_size: Count
    models: list[ModelsFitModelsItem]
    """the models with the most parameters first"""
    left_out: Whole
    """how many smaller models were not asked, because the list has the most rows that it may have"""


class ModelsShow(TypedDict):
    """kvcalc models show"""

    schema_version: Literal[3]
    name: str
    family: str | None
    aliases: list[str]
    source: str
    date: Annotated[str, {"format": "date"}]
    note: str | None
    file: str | None
    """path of the user's own preset; null for a shipped preset"""
    config: dict[str, Any]


class ModelsCheckFilesItem(TypedDict):
    """one file, and its error if it is not valid"""

    file: str
    name: str | None
    ok: bool
    exit_code: Annotated[int, {"minimum": 0, "maximum": 3}]
    error: str | None
    hint: str | None


class ModelsCheck(TypedDict):
    """kvcalc models check"""

    schema_version: Literal[3]
    exit_code: Annotated[int, {"minimum": 0, "maximum": 3}]
    files: Annotated[list[ModelsCheckFilesItem], {"minItems": 1}]


class GpusGpusItem(DeviceFigures):
    """one known device"""

    aliases: list[str]


class GpusShow(GpusGpusItem):
    """kvcalc gpus show"""

    schema_version: Literal[3]


class Gpus(Document):
    """kvcalc gpus"""

    gpus: list[GpusGpusItem]

"""What a LoRA adapter (Hu et al., "LoRA: Low-rank adaptation of large language models", 2022) adds to which products of the model.

PEFT's rules say which modules it has and by how much each counts; whatever of its configuration changes the computation and is not computed here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from kvd.executor.adapter_files import AdapterError, AdapterFiles, StoredTensor
from kvd.executor.models.spec import ModelSpec
from kvd.executor.models.weights.plan import Assignment, assign
from kvd.executor.patterns import PatternError, Patterns

_PREFIX = "base_model.model."
_TABLES = ("model.embed_tokens", "lm_head")
"""What PEFT could adapt besides the layers' products."""
_NOT_HERE = "only the products of the layers are adapted (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj)"
_OTHER_BASE = "it was trained against changed base weights; convert it with PEFT's path_initial_model_for_weight_conversion"

_INERT = frozenset(
    {
        "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "r", "lora_alpha", "lora_dropout",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights",
        "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "qalora_group_size", "ensure_weight_tying",
    }
)  # fmt: skip
"""Keys that are read below, or that say nothing of how outputs are computed."""

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "use_dora": "DoRA scales the weights' columns, which is not computed",
        "lora_bias": "biases are not adapted",
        "modules_to_save": "whole modules of its own are not replaced; train it without",
        "trainable_token_indices": "tokens are not retrained; train it without",
        "fan_in_fan_out": "the model has no transposed weights",
        "layer_replication": "layers are not replicated",
        "target_parameters": "parameters outside of linear modules are not adapted",
        "use_qalora": "QA-LoRA pools its inputs, which is not computed",
        "alora_invocation_tokens": "it is switched on from some token on (aLoRA), which is not computed",
    }
)
"""By key: why an adapter that sets it is refused."""

_MAX_VALUE = 1e6
"""Of a rank or alpha; NaN, infinity and integers that are no floats are none."""

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "true", "True")
"""``init_lora_weights`` that leave the base model's weights as they are."""


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One linear module: ``y[first_row : first_row + num_rows] += scale * B (A x)`` in the product ``part`` of ``layer``."""

    layer: int
    part: str
    """A field of ``LayerWeights``: ``qkv``, ``output``, ``gate_up`` or ``down``."""
    first_row: int
    num_rows: int
    rank: int
    scale: float
    a: StoredTensor
    """``[rank, inputs]``"""
    b: StoredTensor
    """``[num_rows, rank]``"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits the model."""

    name: str
    digest: bytes
    rank: int
    """The largest of its modules'."""
    num_bytes: int
    """Of its weights file."""
    modules: tuple[AdaptedModule, ...]
    """By layer, and within a layer in the order of the computation."""


def max_adapter_bytes(spec: ModelSpec, max_rank: int) -> int:
    """Bytes that the weights file of an adapter of this rank may have, with room for its header."""
    inputs_and_outputs = sum(sum(module.shape) for module in _modules(spec).values())
    return inputs_and_outputs * max_rank * 4 + (1 << 20)


def plan_adapter(files: AdapterFiles, spec: ModelSpec, max_rank: int) -> Adapter:
    """What the adapter adds to the products of the model.

    Raises:
        AdapterError: it asks for what is not computed, does not fit the model, or its files contradict each other; the message says what.
    """
    try:
        return _Planner(files, spec, max_rank).plan()
    except AdapterError as error:
        raise AdapterError(f"adapter {files.name}: {error}") from error


class _Planner:
    def __init__(self, files: AdapterFiles, spec: ModelSpec, max_rank: int) -> None:
        self._files = files
        self._config = files.config
        self._modules = _modules(spec)
        self._max_rank = max_rank
        self._patterns = Patterns()

    def plan(self) -> Adapter:
        self._check_config()
        targets = [name for name in (*self._modules, *_TABLES) if self._is_target(name)]
        if not targets:
            raise AdapterError(f"target_modules {self._config.get('target_modules')!r:.200} names no module of the model")
        for table in _TABLES:
            if table in targets:
                raise AdapterError(f"it adapts {table}: {_NOT_HERE}")
        expected = {f"{_PREFIX}{name}.lora_{half}.weight" for name in targets for half in "AB"}
        unexpected = sorted(self._files.tensors.keys() - expected)
        if unexpected:
            raise AdapterError(f"tensor {unexpected[0]:.200} belongs to no module that target_modules names; {_NOT_HERE}")
        modules = tuple(self._module(name) for name in targets)
        return Adapter(self._files.name, self._files.digest, max(module.rank for module in modules), self._files.num_bytes, modules)

    def _check_config(self) -> None:
        config = self._config
        kind = str(config.get("peft_type", "")).upper()
        if kind != "LORA":
            raise AdapterError(f"peft_type is {config.get('peft_type')!r:.40}; only LORA is supported")
        if config.get("task_type") not in (None, "CAUSAL_LM"):
            raise AdapterError(f"task_type is {config['task_type']!r:.40}; only CAUSAL_LM is supported")
        for key, reason in _REFUSED.items():
            if _is_set(config.get(key)):
                raise AdapterError(f"{key} is set: {reason}")
        if config.get("bias", "none") != "none":
            raise AdapterError(f"bias is {config['bias']!r:.40}: biases are not adapted")
        start = config.get("init_lora_weights", True)
        if start not in _PLAIN_STARTS:
            raise AdapterError(f"init_lora_weights is {start!r:.40}: {_OTHER_BASE}")
        for key in sorted(config.keys() - _INERT - _REFUSED.keys() - {"bias"}):
            if _is_set(config[key]):
                raise AdapterError(f"{key} is set, which is not known here; it may change what the adapter computes")

    def _is_target(self, name: str) -> bool:
        """PEFT's ``check_target_module_exists``."""
        config = self._config
        excluded, targets = config.get("exclude_modules"), config.get("target_modules")
        if excluded and self._names(excluded, name, "exclude_modules"):
            return False
        if targets == "all-linear":
            return name not in _TABLES
        if not targets or not self._names(targets, name, "target_modules"):
            return False
        layers = config.get("layers_to_transform")
        if isinstance(targets, str) or layers is None or name in targets:
            return True
        if not isinstance(layers, int | list):
            raise AdapterError(f"layers_to_transform is {layers!r:.80}; a number or a list of numbers is wanted")
        patterns = config.get("layers_pattern") or ["[^.]*"]
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
            raise AdapterError(f"layers_pattern is {patterns!r:.80}; a regular expression or a list of them is wanted")
        found = next((match for pattern in patterns if (match := self._match(rf".*\.{pattern}\.(\d+)\.", name, "layers_pattern"))), None)
        number = found and found.group(found.re.groups)  # the last group: a pattern may have some of its own
        return number is not None and int(number) in ([layers] if isinstance(layers, int) else layers)

    def _module(self, name: str) -> AdaptedModule:
        place = self._modules[name]
        rank = self._value("r", "rank_pattern", name, default=8)
        alpha = self._value("lora_alpha", "alpha_pattern", name, default=8)
        if not isinstance(rank, int) or not 1 <= rank <= self._max_rank:
            raise AdapterError(f"{name} has rank {rank}; 1 to {self._max_rank} are taken (max_adapter_rank)")
        scale = alpha / (rank**0.5 if self._config.get("use_rslora") else rank)
        outputs, inputs = place.shape
        assert place.layer is not None, "only layers are adapted"
        return AdaptedModule(
            layer=place.layer,
            part=place.part,
            first_row=place.first_row,
            num_rows=place.num_rows,
            rank=rank,
            scale=scale,
            a=self._tensor(f"{_PREFIX}{name}.lora_A.weight", (rank, inputs)),
            b=self._tensor(f"{_PREFIX}{name}.lora_B.weight", (outputs, rank)),
        )

    def _value(self, key: str, pattern_key: str, name: str, default: int) -> Any:
        """A module's rank or alpha: that of the first pattern that names it (PEFT's ``get_pattern_key``), else the general one."""
        patterns = self._config.get(pattern_key) or {}
        if not isinstance(patterns, Mapping):
            raise AdapterError(f"{pattern_key} is {patterns!r:.80}, no object")
        value = next((each for pattern, each in patterns.items() if self._match(rf"(.*\.)?({pattern})$", name, pattern_key)), None)
        if value is None:
            value = self._config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise AdapterError(f"{key} is {value!r:.40}, no number")
        if not abs(value) <= _MAX_VALUE:
            raise AdapterError(f"{key} is too large or none; a number of at most {_MAX_VALUE:g} is wanted")
        return value

    def _tensor(self, name: str, shape: tuple[int, int]) -> StoredTensor:
        tensor = self._files.tensors.get(name)
        if tensor is None:
            raise AdapterError(f"tensor {name} is missing, though target_modules names its module")
        if tensor.shape != shape:
            raise AdapterError(f"tensor {name} has shape {list(tensor.shape)}, this model and configuration want {list(shape)}")
        return tensor

    def _names(self, names: str | Sequence[str], module: str, key: str) -> bool:
        """Whether a regular expression matches the whole name, or a list holds the name or the end of it."""
        if isinstance(names, str):
            return self._match(rf"(?:{names})\Z", module, key) is not None
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise AdapterError(f"{key} is {names!r:.80}; a regular expression or a list of names is wanted")
        return any(module == each or module.endswith(f".{each}") for each in names)

    def _match(self, pattern: str, name: str, key: str) -> re.Match[str] | None:
        try:
            return self._patterns.match(pattern, name)
        except PatternError as error:
            raise AdapterError(f"{key}: {pattern!r:.120}: {error}") from error


def _modules(spec: ModelSpec) -> dict[str, Assignment]:
    """The layers' linear modules by the names that PEFT knows them by, in the order of the computation, whatever format the model is in."""
    plan = assign(replace(spec, weights_format="safetensors"))
    return {item.name.removesuffix(".weight"): item for item in plan if item.layer is not None and len(item.shape) == 2}


def _is_set(value: object) -> bool:
    return value not in (None, False, "", [], {})

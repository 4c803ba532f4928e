"""Reads the safetensors files of a Hugging Face directory through a memory map, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvd.executor.models.spec import ModelSpec, WeightsError
from kvd.executor.models.weight_files import weight_files

_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class SafetensorsSource:
    """The tensors of all weight files together.

    Raises:
        WeightsError: a file is damaged or cut short, a tensor occurs twice or is stored in a type that is not read.
    """

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.origin = str(path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.sizes_bytes: dict[str, int] = {}
        self.ignored = frozenset(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(spec.num_layers))
        self._files: dict[str, Any] = {}
        for file in weight_files(path):
            self._open(file)
        if spec.tied_head and "lm_head.weight" in self.shapes:
            self._check_tied_head()

    def read(self, name: str) -> Iterator[Tensor]:
        """The tensor in one piece, mapped and not copied."""
        yield self._files[name].get_tensor(name)

    def stored(self, name: str) -> tuple[int, str]:
        """See ``WeightSource.stored``."""
        file = self._files[name]
        return file.get_tensor(name).data_ptr(), file.get_slice(name).get_dtype()

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: damaged or truncated safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            if name in self._files:
                raise WeightsError(f"{path}: tensor {name} occurs in another file too")
            header = file.get_slice(name)
            stored = header.get_dtype()
            if stored not in _BYTES and not name.endswith(".rotary_emb.inv_freq"):
                raise WeightsError(f"{path}: tensor {name} is stored as {stored}; supported: {', '.join(_BYTES)}")
            self.shapes[name] = tuple(header.get_shape())
            self.sizes_bytes[name] = math.prod(self.shapes[name]) * _BYTES.get(stored, 0)
            self._files[name] = file

    def _check_tied_head(self) -> None:
        """A tied model's file may carry the head once more; it must be the embedding then."""
        embedding = self._files.get("model.embed_tokens.weight")
        if embedding is None or not embedding.get_tensor("model.embed_tokens.weight").equal(next(self.read("lm_head.weight"))):
            raise WeightsError(
                f"{self.origin}: tie_word_embeddings is set, but tensor lm_head.weight differs from model.embed_tokens.weight"
            )
        self.ignored |= {"lm_head.weight"}

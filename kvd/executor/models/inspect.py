"""The front door to a model's description: whichever format it is in."""

from __future__ import annotations

from pathlib import Path

from kvd.executor.models.gguf_config import inspect_gguf
from kvd.executor.models.hf_config import inspect_directory
from kvd.executor.models.spec import ModelError, ModelSpec, UnsupportedModelError


def inspect_model(path: Path) -> ModelSpec:
    """Describe the model at ``path``, a GGUF file or a Hugging Face directory, from its metadata; weights stay unread.

    Raises:
        UnsupportedModelError: the architecture, a feature of it or the kind of its weights is not supported.
        ModelError: there is no model, or its description is damaged.
    """
    if path.is_dir():
        return inspect_directory(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise UnsupportedModelError(f"{path}: not a GGUF file; a model is a GGUF file or a Hugging Face directory with safetensors weights")
    return inspect_gguf(path)

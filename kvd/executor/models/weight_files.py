"""Which files hold a model's weights. Plain paths and JSON: the fingerprint needs the list where torch is not loaded."""

from __future__ import annotations

from pathlib import Path

from kvd.executor.models.spec import ModelError, UnsupportedModelError, WeightsError, read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def weight_files(path: Path) -> tuple[Path, ...]:
    """The weight files of a GGUF file or a Hugging Face directory, in the order of their names.

    A directory's files are ``model.safetensors``, else those its index names, else every ``*.safetensors`` in it.

    Raises:
        UnsupportedModelError: the directory holds pickled weights alone.
        WeightsError: there are no weights, or the index is damaged or names a file that is missing or lies elsewhere.
    """
    if not path.is_dir():
        return (path,)
    if (path / _SINGLE).exists():
        return (path / _SINGLE,)
    if (path / _INDEX).exists():
        return _indexed_files(path)
    found = tuple(sorted(path.glob("*.safetensors")))
    if found:
        return found
    if any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth")):
        raise UnsupportedModelError(f"{path}: pickled weights (.bin, .pt, .pth) are not read; convert them to safetensors")
    raise WeightsError(f"{path}: no weights; expected {_SINGLE}, {_INDEX} or *.safetensors")


def _indexed_files(path: Path) -> tuple[Path, ...]:
    try:
        weight_map = read_json(path / _INDEX).get("weight_map")
    except ModelError as error:
        raise WeightsError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise WeightsError(f"{path / _INDEX}: no weight_map of tensor names to file names")
    files = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(f"{path / _INDEX}: {name!r} is not the name of a safetensors file beside it")
        if not (path / name).exists():
            raise WeightsError(f"{path / name}: missing, but the index names it")
        files.append(path / name)
    return tuple(files)

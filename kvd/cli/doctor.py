"""``kvd doctor``: what kvd finds on this machine, and what would keep it from running."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from kvd.cli.exits import Exit
from kvd.cli.output import print_facts, print_json
from kvd.config import DaemonConfig
from kvd.settings import loader as settings
from kvd.settings import model_store
from kvd.settings.units import human_size

_DISTRIBUTIONS = (
    "kvd",
    "kvd-client",
    "torch",
    "lmdb",
    "pyzmq",
    "msgpack",
    "msgspec",
    "structlog",
    "crc32c",
    "tokenizers",
    "safetensors",
    "gguf",
)
_ISA_FLAGS = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_bf16", "avx512_vnni"),
}
"""What the instruction sets of the native kernels need (kernels/cpu/dispatch.cpp), in the names of /proc/cpuinfo; each needs the one before it too."""
_CPU_FLAGS = (*_ISA_FLAGS["avx2"], *_ISA_FLAGS["avx512"], "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")


@click.command()
@click.option("--config", "config_file", metavar="FILE", type=click.Path(path_type=Path), help="TOML file; $KVD_CONFIG otherwise.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(config_file: Path | None, as_json: bool) -> int:
    """Show versions, processor, memory, models, directories and limits as kvd sees them.

    Exit code 78 if something listed under `problems` would keep `kvd serve` from running.
    """
    from kvd_client.endpoints import default_endpoint, default_listen_endpoint

    loaded = settings.load({}, config_file=config_file, default_listen=default_listen_endpoint)
    config = loaded.config
    report: dict[str, Any] = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "versions": dict(_versions()),
        "cpu": _cpu(),
        "memory": _memory(),
        "executor": _executor(loaded),
        "models": {name: str(path) for name, path in model_store.installed()},
        "models_dir": str(model_store.pull_dir()),
        "state_dir": _directory(config.storage.state_dir),
        "listen": [_endpoint(endpoint) for endpoint in config.transport.listen],
        "connect": default_endpoint(),
        "limits": _limits(),
        "service_manager": bool(os.environ.get("NOTIFY_SOCKET")),
    }
    report["problems"] = list(_problems(loaded, report))
    if as_json:
        print_json(report)
    else:
        _print(report)
    return Exit.CONFIG if report["problems"] else Exit.OK


def _versions() -> Iterator[tuple[str, str]]:
    for distribution in _DISTRIBUTIONS:
        try:
            yield distribution, metadata.version(distribution)
        except metadata.PackageNotFoundError:
            yield distribution, "missing"


def _cpu() -> dict[str, Any]:
    facts: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        facts = dict(reversed([(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]))
    except OSError:
        facts = {}
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return {
        "model": facts.get("model name", platform.processor() or platform.machine()),
        "usable_threads": len(os.sched_getaffinity(0)),
        "features": [flag for flag in _CPU_FLAGS if flag in flags],
    }


def _memory() -> dict[str, int]:
    wanted = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes"}
    try:
        fields = [line.split() for line in Path("/proc/meminfo").read_text("ascii").splitlines()]
    except OSError:
        return {}
    return {wanted[field[0][:-1]]: int(field[1]) * 1024 for field in fields if field[0][:-1] in wanted}


def _executor(loaded: settings.Settings) -> dict[str, Any]:
    """What `auto` becomes here."""
    config = loaded.config
    if config.model.executor == "fake":
        return {"executor": "fake"}
    try:
        from kvd.executor.assemble import pool_bytes, resolve_device, resolve_dtype
        from kvd.executor.host_cores import compute_threads

        device = resolve_device(config.model.device)
        dtype = resolve_dtype(config.model.dtype, device, "bfloat16")
        pool = pool_bytes(config.cache.kv_memory, device)
        kernels = _kernels(config, device, dtype)
    except Exception as error:  # a broken torch is what a doctor is asked about
        return {"executor": "torch", "error": f"{type(error).__name__}: {error}"}
    return {
        "executor": "torch",
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": compute_threads(config.model.threads),
        "kernels": kernels,
        "kv_memory_bytes": pool,
    }


def _kernels(config: DaemonConfig, device: Any, dtype: Any) -> str:
    """The kernel family that computes the configured model (any model, if that one is not there), and why not a better one."""
    from kvd.executor.kernel_choice import GPU_KERNEL_FAMILY, has_gpu_kernels, kernel_family, why_torch
    from kvd.executor.kernels.cpu import native
    from kvd.executor.models.inspect import inspect_model
    from kvd.executor.models.weights.native import keeps_quantised

    model = config.model
    if device.type == "cuda" and model.kernels == "auto":
        return GPU_KERNEL_FAMILY if has_gpu_kernels(model.kernels, device) else "torch (Triton is not installed)"
    try:
        spec = inspect_model(Path(model_store.resolve_model(model.model)))
    except model_store.ModelNotFoundError:
        spec = None
    reason = why_torch(model.kernels, spec, device, dtype, config.cache.block_size_tokens)
    if reason:
        return f"torch ({reason})"
    family = kernel_family(quantised=spec is not None and keeps_quantised(spec, model.weights))
    status = native.status()
    limit = _why_no_better(str(status.isa), status.available_isas, _cpu()["features"])
    return f"{family} ({limit})" if limit else family


def _why_no_better(isa: str, available: Sequence[str], features: Sequence[str]) -> str:
    """Why the native kernels don't use the instruction set after ``isa``; empty if there is none."""
    known = ("portable", *_ISA_FLAGS)
    if platform.machine() != "x86_64" or isa == known[-1]:
        return ""
    better = known[known.index(isa) + 1]
    if better in available:
        return f"{better} is there, but the environment chooses {isa}"
    return f"{better} needs: {' '.join(flag for flag in _ISA_FLAGS[better] if flag not in features)}"


def _directory(path: Path) -> dict[str, Any]:
    """A directory, or the nearest one above it that exists and decides whether it can be made."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    stat = os.statvfs(existing)
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return {"path": str(path), "exists": path.exists(), "writable": is_writable, "free_bytes": stat.f_bavail * stat.f_frsize}


def _endpoint(endpoint: str) -> dict[str, Any]:
    if not endpoint.startswith("ipc://"):
        return {"endpoint": endpoint}
    path = Path(endpoint.removeprefix("ipc://"))
    return {"endpoint": endpoint, "in_use": _is_answered(path), "writable": _directory(path.parent)["writable"]}


def _is_answered(path: Path) -> bool:
    """Whether somebody listens at the socket; one that a killed daemon left behind refuses."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a full backlog is an answer too
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # not ours to connect to, or busy
            return path.is_socket()
        return True


def _limits() -> dict[str, str]:
    names = {"open_files": resource.RLIMIT_NOFILE, "locked_memory": resource.RLIMIT_MEMLOCK, "address_space": resource.RLIMIT_AS}

    def show(value: int) -> str:
        return "unlimited" if value == resource.RLIM_INFINITY else str(value)

    return {name: show(resource.getrlimit(limit)[0]) for name, limit in names.items()}


def _problems(loaded: settings.Settings, report: dict[str, Any]) -> Iterator[str]:
    for distribution, version in report["versions"].items():
        if version == "missing":
            yield f"{distribution} is not installed"
    if "error" in report["executor"]:
        yield f"executor: {report['executor']['error']}"
    if loaded.config.model.executor != "fake":
        try:
            model_store.resolve_model(loaded.config.model.model)
            if draft := loaded.config.speculative.draft_model:
                model_store.resolve_model(draft, key="speculative.draft_model")
        except model_store.ModelNotFoundError as error:
            yield str(error)
    if not report["state_dir"]["writable"]:
        yield f"storage.state_dir: {report['state_dir']['path']} can't be written (from {loaded.origins['state_dir']})"
    for listen in report["listen"]:
        if not listen.get("writable", True):
            yield f"transport.listen: the directory of {listen['endpoint']} can't be written (from {loaded.origins['listen']})"


def _print(report: dict[str, Any]) -> None:
    memory, cpu, state_dir = report["memory"], report["cpu"], report["state_dir"]
    executor = {key: human_size(value) if key.endswith("_bytes") else value for key, value in report["executor"].items()}
    print_facts(
        [
            ("python", report["python"]),
            ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
            ("cpu", f"{cpu['model']}, {cpu['usable_threads']} threads, {' '.join(cpu['features']) or 'no known vector features'}"),
            ("memory", ", ".join(f"{human_size(value)} {key.removesuffix('_bytes')}" for key, value in memory.items())),
            ("executor", ", ".join(f"{key.removesuffix('_bytes')} {value}" for key, value in executor.items())),
            ("models", ", ".join(f"{name} ({path})" for name, path in report["models"].items()) or "none"),
            (
                "state",
                f"{state_dir['path']}, {'writable' if state_dir['writable'] else 'not writable'}, {human_size(state_dir['free_bytes'])} free",
            ),
            ("listen", ", ".join(listen["endpoint"] + (" (in use)" if listen.get("in_use") else "") for listen in report["listen"])),
            ("connect", report["connect"]),
            ("limits", ", ".join(f"{name} {value}" for name, value in report["limits"].items())),
            ("problems", "\n          ".join(report["problems"]) or "none"),
        ]
    )

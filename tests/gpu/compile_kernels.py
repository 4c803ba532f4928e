"""Compile every Triton kernel to machine code for a GPU that need not be here: python tests/gpu/compile_kernels.py [CAPABILITY, as 90]. TRITON_INTERPRET must not be set."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvd.executor.kernels.triton import activation, attention, norm, rotary  # noqa: E402

_INTS = {
    "row", "table_stride", "plane", "planes_per_block", "size",
}  # fmt: skip
_INT_POINTERS = {"tables", "num_pieces", "pieces", "piece_tokens", "positions", "slots", "chunks", "token_rows"}
_FLOAT_POINTERS = {"totals", "weighted_out", "weighted_in", "cosines", "sines", "residual"}
_FLOATS = {"scale", "eps"}


def compile_for(kernel, dtype: str, target: GPUTarget, **constants) -> int:
    """Bytes of shared memory that the kernel takes."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in _INTS:
            signature[name] = "i32"
        elif name in _INT_POINTERS:
            signature[name] = "*i32"
        elif name in _FLOAT_POINTERS:
            signature[name] = "*fp32"
        elif name in _FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = f"*{dtype}"
    return triton.compile(ASTSource(kernel, signature, constants), target=target).metadata.shared


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]) if len(sys.argv) > 1 else 90, 32)
    for dtype, operand in (("bf16", tl.bfloat16), ("fp16", tl.float16), ("fp32", tl.float32)):
        print(f"{dtype}: norm {compile_for(norm._add_and_norm, dtype, target, HAS_UPDATE=True, WIDTH=2048)}", end=", ")
        print(f"activation {compile_for(activation._silu_mul, dtype, target, WIDTH=1024)}", end=", ")
        for num_heads, num_kv_heads, head_dim, window in ((32, 8, 64, 0), (32, 8, 128, 4096), (9, 3, 80, 0)):
            dims = triton.next_power_of_2(head_dim)
            heads = triton.next_power_of_2(num_heads + 2 * num_kv_heads)
            shape = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim}
            tiles = shape | {"DIMS": dims, "TILE": 64 if dtype == "fp32" else 128, "WINDOW": window}
            wide = {"BLOCK": 16, "OPERAND": operand}
            chunk = 16 if dtype == "fp32" else 64
            sizes = [
                compile_for(rotary._rotate_and_write, dtype, target, **shape, BLOCK=16, HEADS=heads, HALF=dims // 2, HAS_NORM=True),
                compile_for(attention._attend_pieces, dtype, target, **tiles, **wide, LANES=16),
                compile_for(attention._merge_pieces, dtype, target, **tiles, HEADS=triton.next_power_of_2(num_heads // num_kv_heads)),
                compile_for(attention._attend_chunks, dtype, target, **tiles, **wide, LANES=chunk),
            ]
            print(f"head_dim {head_dim}: {sizes}", end=", ")
        print()
    print("every kernel compiles for", target.arch)


if __name__ == "__main__":
    main()

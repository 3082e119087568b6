"""The Triton kernels compile for GPUs that are not here: types, constants and shared memory; nothing runs."""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron.kernels.triton import support
from dfa_megatron.kernels.triton.adapter import LARGE, SMALL
from dfa_megatron.kernels.triton.support import FUSED, launch, triton_refusal

pytestmark = pytest.mark.skipif(triton_refusal() is not None, reason=str(triton_refusal()))

POINTERS = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "dout": "*bf16", "out": "*bf16", "lse": "*fp32",
            "minus_delta": "*fp32", "dq": "*bf16", "dk": "*bf16", "dv": "*bf16", "table": "*i32",
            "scale": "fp32"}  # fmt: skip
SHARED = {90: 227 * 1024, 80: 99 * 1024}


def shared_bytes(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int) -> int:
    """Compile for a GPU of that compute capability; the shared memory that a program takes."""
    return int(compiled(kernel, types, constants, capability, **options).metadata.shared)


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int) -> Any:
    """Compile for a GPU of that compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    known = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=known)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=FUSED | options)


def test_every_launch_says_whether_products_are_fused() -> None:
    """Triton 3.9 warns that its own default changes with 3.10; `launch` alone calls a kernel."""
    asked: list[dict[str, Any]] = []
    kernel = {(2,): lambda *args, **constants: asked.append(constants)}
    launch(kernel, (2,), BLOCK=4, **({} if FUSED else {"enable_fp_fusion": True}))
    launch(kernel, (2,), enable_fp_fusion=False)
    assert asked == [{"BLOCK": 4, "enable_fp_fusion": True}, {"enable_fp_fusion": False}]
    folder = Path(support.__file__).parent
    trees = {file.name: ast.walk(ast.parse(file.read_text(encoding="utf-8"))) for file in folder.glob("*.py")}
    calls = {(name, type(node.func)) for name, tree in trees.items() for node in tree if isinstance(node, ast.Call)}
    assert [name for name, of in calls if of is ast.Subscript] == ["support.py"]


@pytest.mark.support("kernels", "compiled for 8.0 and 9.0 without a GPU", "`triton`")
@pytest.mark.parametrize("name", ["_forward", "_dk_dv", "_dq"])
@pytest.mark.parametrize(("packed", "cap", "bounded", "capability"), [(True, 0.0, True, 90), (False, 30.0, False, 80)])
def test_attention_compiles(name: str, packed: bool, cap: float, bounded: bool, capability: int) -> None:
    from dfa_megatron.kernels.triton import backward as triton_backward
    from dfa_megatron.kernels.triton import forward as triton_forward

    sizes = (LARGE if capability >= 90 else SMALL)[2][128]
    block_m, block_n, warps, stages = getattr(sizes, {"_forward": "forward", "_dk_dv": "dk_dv", "_dq": "dq"}[name])
    constants: dict[str, Any] = dict.fromkeys(("DIM", "DIM_V", "BLOCK_D", "BLOCK_DV"), 128)
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "HAS_LO": False, "HAS_HI": bounded, "EVEN": False}
    constants |= {"UPCAST": False, "PACKED": packed, "CAP": cap}
    if not packed:
        constants["table"] = None
    kernel = getattr(triton_forward if name == "_forward" else triton_backward, name)
    shared = shared_bytes(kernel, POINTERS, constants, capability, num_warps=warps, num_stages=stages)
    assert shared <= SHARED[capability]


@pytest.mark.parametrize("count", [2, 4])
def test_merges_compile(count: int) -> None:
    from dfa_megatron.kernels.triton import merge as triton_merge

    types = dict.fromkeys(("out0", "out1", "out2", "out3", "into_out", "x0", "x1", "x2", "x3", "into"), "*bf16")
    types |= dict.fromkeys(("lse0", "lse1", "lse2", "lse3", "into_lse"), "*fp32")
    merge = {"COUNT": count, "DIM": 128, "BLOCK_ROWS": 32, "BLOCK_D": 128}
    assert shared_bytes(triton_merge._merge, types, merge, 90, num_warps=4) < SHARED[90]
    assert shared_bytes(triton_merge._add, types, {"COUNT": count, "BLOCK": 4096}, 90, num_warps=8) < SHARED[90]


@pytest.mark.parametrize("head_dim", [24, 40, 128])
def test_the_threads_of_a_row_agree_on_its_sum(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adds the others' products to its own: fused into one operation, its own would be rounded less."""
    from dfa_megatron.kernels.triton import merge as triton_merge

    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(triton_merge, "launch", lambda *args, **constants: launches.append(constants))
    x = torch.empty(1, 9, 2, head_dim)
    triton_merge.minus_delta(x, x)
    options = {name: launches[0].pop(name) for name in ("num_warps", "enable_fp_fusion")}
    types = {"a": "*fp32", "b": "*fp32", "into": "*fp32"}
    assert "FFMA" not in compiled(triton_merge._minus_delta, types, launches[0], 90, **options).asm["sass"]


def variants(monkeypatch: pytest.MonkeyPatch, modules: Sequence[Any], run: Callable[[], object]) -> Counter[str]:
    """How many kernels Triton would compile for the launches of a function, by name; nothing is launched."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend, found = make_backend(GPUTarget("cuda", 90, 32)), set()

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, _ = binder(*args, **constants)
        found.add((kernel.__name__, str(specialization)))

    for module in modules:
        monkeypatch.setattr(module, "launch", launch)
    run()
    return Counter(name for name, _ in found)


def test_documents_of_any_length_share_the_kernels_that_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    from dfa_megatron.kernels.triton import merge as triton_merge

    draw = random.Random(5)

    def run() -> None:
        for _ in range(100):
            length = draw.choice((1, draw.randrange(2, 600), 16 * draw.randrange(1, 40)))
            parts = []
            for _ in range(3):
                before = draw.choice((0, draw.randrange(1, 100)))
                rows = before + length + draw.choice((0, draw.randrange(1, 100)))
                out = torch.empty(1, rows, 8, 64, dtype=torch.bfloat16)[:, before : before + length]
                parts.append((out, torch.empty(1, 8, rows)[:, :, before : before + length]))
            triton_merge.merge(parts[:2], parts[2])
            triton_merge.merge(parts, parts[0])
            triton_merge.add([out for out, _ in parts], parts[0][0])
            triton_merge.minus_delta(parts[0][0], parts[1][0])

    assert variants(monkeypatch, [triton_merge], run) == {"_merge": 2, "_add": 1, "_minus_delta": 1}

"""The Python code of the pages: which of it runs by itself on a CPU, and why the rest does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

Block = tuple[str, str]
"""A page, and words of its first block of Python that has them."""

ALONE = (
    ("docs/masks.md", "mask=mask"),
    ("docs/masks.md", "union("),
    ("docs/masks.md", "of_lengths("),
    ("docs/indexed.md", "index_topk"),
    ("docs/masks.md", "cross_documents("),
    ("docs/migration.md", "q_ranges"),
    ("docs/remat.md", "q.chunk(4, 2)"),
    ("docs/packed.md", "dist_flash_attn_varlen_func"),
    ("docs/start.md", "dist_flash_attn_func(*map"),
    ("docs/trees.md", "mask=pack"),
)
"""Blocks that need PyTorch alone."""

WITH_TRANSFORMERS = (
    ("docs/huggingface.md", "import huggingface as dfa_hf"),
    ("docs/huggingface.md", "position_ids=positions"),
    ("docs/huggingface.md", "local_attention"),
    ("docs/loss.md", "by_document"),
    ("docs/trees.md", "from_rollouts(rollouts"),
    ("docs/same-bits.md", "RowsInTiles"),
)
"""Blocks that run where transformers is installed."""

_ENGINE = "DeepSpeed's engine needs its launcher; tests/deepspeed makes the same calls"
_MEGATRON = "Megatron needs its parallel state; tests/megatron makes the same calls"
_RANKS = "it needs as many ranks as it names"
NOT_RUN = {
    ("docs/deepspeed.md", "mesh_of(engine)"): _ENGINE,
    ("docs/deepspeed.md", "deepspeed_shm_comm"): _ENGINE,
    ("docs/deepspeed.md", "PipelineModule"): _ENGINE,
    ("docs/hybrids.md", "torch.distributed.nn"): "it needs a group; tests/sequence/test_two_lines.py runs it in one",
    ("docs/masks.md", "logsumexp"): "it needs sinks and biases; tests/sequence/test_two_lines.py has them",
    ("docs/hybrids.md", "fla_scan"): "flash-linear-attention and Mamba's kernels need a GPU",
    ("docs/megatron.md", "GPTModel("): _MEGATRON,
    ("docs/megatron.md", 'batch["cu_seqlens"]'): _MEGATRON,
    ("docs/megatron.md", "mtp_spec"): _MEGATRON,
    ("docs/megatron.md", "hybrid_stack_spec"): _MEGATRON,
    ("docs/monitor.md", "StepLog("): "it stands for a loop",
    ("docs/monitor.md", "wandb.log"): "it needs an account of wandb",
    ("docs/packed.md", "plan_batches"): "it stands for a loop; tests/plan/test_batches.py has one",
    ("docs/schedules.md", "ulysses_degree=4"): _RANKS,
    ("README.md", "AutoModelForCausalLM"): "it loads a model of 8B; examples/trainer_packed.py makes the same calls",
    ("docs/trainers.md", "SFTTrainer("): _RANKS,
    ("docs/trainers.md", "distribute_accelerator"): _RANKS,
    ("docs/trainers.md", "add_cp_backend"): _RANKS,
    ("docs/trainers.md", "fully_shard("): _RANKS,
    ("docs/trainers.md", "distribute(model, device_mesh"): _RANKS,
    ("docs/trainers.md", "get_gpt_decoder_block_spec"): _MEGATRON,
}
"""Blocks that do not run by themselves, with the reason."""


def blocks_of(page: Path) -> list[str]:
    """The blocks of Python code of a page."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def find(block: Block) -> str:
    """The code that a page and words stand for."""
    name, words = block
    return next(code for code in blocks_of(ROOT / name) if words in code)


def run(block: Block, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block with these names at hand, and return all names that are there then."""
    exec(compile(find(block), f"{block[0]}: {block[1]}", "exec"), names)  # noqa: S102 our own page
    return names

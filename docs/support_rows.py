"""The rows of support.md: for each cell a pattern of the tests that it stands for, from `tests/` on.

A pattern is a regular expression that begins with the file, spelled out, and `::`. What its tests compute is theirs
to say; a label here may claim no more than they assert.
"""

from __future__ import annotations

import ast
from pathlib import Path

KINDS = ("passed CPU", "passed GPU", "failed CPU", "failed GPU", "not run CPU", "not run GPU", "refused")
"""What can become of a test; the order of the counts in support.json."""

KERNELS = ("reference", "cpu", "triton", "aten", "cudnn", "flash4", "flash3", "flash2")

_CONFORMANCE = r"kernels/test_kernel_conformance.py::test_a_block_is_what_dense_float64_attention_says\["
_BF16 = _CONFORMANCE + r"bfloat16-"
_ON = r"-{kernel} on c\w+\]"
_KERNEL_ROWS = {
    "full blocks": _BF16 + r"\d+x\d+-full-" + r".*-d32-b\d" + _ON,
    "causal, square": _BF16 + r"(\d+)x\1-band-1,0-" + r".*-d32-b\d" + _ON,
    "windows, offsets, other bands": _BF16 + r"\d+x\d+-band(?!-1,0-).*-d32-b\d" + _ON,
    "float64": _CONFORMANCE + r"float64-.*-d32-b\d" + _ON,
    "float32": _CONFORMANCE + r"float32-.*-d32-b\d" + _ON,
    "bfloat16": _BF16 + r".*-d32-b\d" + _ON,
    "float16": _CONFORMANCE + r"float16-.*-d32-b\d" + _ON,
    "head_dim 64": _BF16 + r".*-d64-b\d" + _ON,
    "head_dim 128": _BF16 + r".*-d128-b\d" + _ON,
    "head_dim 192": _BF16 + r".*-d192-b\d" + _ON,
    "head_dim 256": _BF16 + r".*-d256-b\d" + _ON,
    "head_dim 192, v 128": _BF16 + r".*-d192v128-b\d" + _ON,
    "head_dim 17, 33 or 100": _BF16 + r".*-d(17|33|100)-b\d" + _ON,
    "grouped heads": _BF16 + r".*-h(8:2|6:1|6:3|4:2|33:11|6:2|2:1)-d32-b\d" + _ON,
    "strided and misaligned inputs": r"kernels/test_kernel_conformance.py::test_strided_views.*" + _ON,
    "deterministic backward": r"kernels/test_kernel_conformance.py::test_deterministic_gradients.*" + _ON,
    "several segments in a call": r"kernels/test_kernel_segments.py::test_a_call_of_several.*-bfloat16" + _ON,
    "softcap": r"kernels/test_kernel_softcap.py::test_a_block_of_capped_scores.*-bfloat16" + _ON,
    "ALiBi": r"kernels/test_kernel_alibi.py::test_a_block_with_alibi.*-bfloat16" + _ON,
    "random attentions (`DFA_STRESS`)": r"kernels/test_kernel_stress.py::test_random_attentions.*\[{kernel}-",
    "a part of these in Triton's interpreter": r"kernels/test_kernel_triton_interpreted.py::test_the_triton_kernels",
    "compiled for 8.0 and 9.0 without a GPU": r"kernels/test_kernel_triton_compiles.py::test_attention_compiles",
    "calls to stand-ins for its operators": r"kernels/test_kernel_gpu_calls.py::test_gpu_kernels_give.*\[{kernel}[-,]",
}
_ONLY = {
    "a part of these in Triton's interpreter": ("triton",),
    "compiled for 8.0 and 9.0 without a GPU": ("triton",),
    "softcap": ("reference", "triton", "flash4"),
    "ALiBi": ("reference", "triton"),
    "random attentions (`DFA_STRESS`)": ("triton", "aten", "cudnn", "flash4", "flash3", "flash2"),
    "calls to stand-ins for its operators": ("aten", "cudnn", "flash4", "flash3", "flash2"),
}

_PACK_MASKS = ("causal", "causal window", "bidirectional")
_MASKS = ("causal", "full", "window", "two sides")
_ANY_RANKS = r"runtime/execute/test_together.py::test_every_schedule_is_exact.*\[{schedule}-{layout}-{mask}\]"
_PACKS = r"runtime/execute/test_together_varlen.py::test_random_packs.*\[{schedule}-{layout}-{mask}\]"
_GREEDY = r"runtime/execute/test_together_greedy.py::test_greedy_is_exact\[\d+-{mask}\]"
_SCHEDULES = {"ring": "contiguous", "balanced": "contiguous", "balanced_shared": "contiguous", "zigzag": "zigzag"}
_OTHERS_REFUSE = {
    "softcap": r"kernels/test_kernel_softcap.py::test_kernels_that_cap_nothing_refuse",
    "ALiBi": r"kernels/test_kernel_alibi.py::test_kernels_without_alibi_refuse",
}
REFUSES = set(_OTHERS_REFUSE.values()) | {
    pattern.format(schedule=schedule, layout="contiguous", mask=mask)
    for schedule in ("balanced", "balanced_shared")
    for pattern, mask in ((_ANY_RANKS, "full"), (_ANY_RANKS, "two sides"), (_PACKS, "bidirectional"))
}
"""Tests that pass because these are refused."""


def _kernel_lines() -> dict[str, list[str]]:
    return {
        label: [
            pattern.replace("{kernel}", kernel)
            if kernel in _ONLY.get(label, KERNELS)
            else _OTHERS_REFUSE.get(label, "")
            for kernel in KERNELS
        ]
        for label, pattern in _KERNEL_ROWS.items()
    }


def _schedule_lines() -> dict[str, list[str]]:
    lines = {}
    for schedule, layout in (*_SCHEDULES.items(), ("greedy", "contiguous"), ("load_balanced", "load_balanced")):
        plain = _GREEDY if schedule == "greedy" else _ANY_RANKS
        one = [plain.format(schedule=schedule, layout=layout, mask=mask) for mask in _MASKS]
        packs = [_PACKS.format(schedule=schedule, layout=layout, mask=mask) for mask in _PACK_MASKS]
        lines[f"`{schedule}`, {layout} tokens"] = ([""] * len(_MASKS) if schedule == "load_balanced" else one) + packs
    return lines


def _models() -> str:
    """The model types that the parity test builds."""
    source = (Path(__file__).parents[1] / "tests" / "huggingface" / "test_parity.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.value, ast.Dict)
            and ast.unparse(node.target) == "MODELS"
        ):
            kinds = {ast.literal_eval(value.elts[0]) for value in node.value.values if isinstance(value, ast.Tuple)}
            return ", ".join(sorted(kinds))
    raise LookupError("tests/huggingface/test_parity.py has no MODELS")


_MASKS_IN_WORDS = (
    "causal", "full", "causal window", "window on both sides",
    "packs: causal", "packs: causal windows", "packs: bidirectional",
)  # fmt: skip
GRIDS: dict[str, tuple[tuple[str, ...], dict[str, list[str]]]] = {
    "kernels": (tuple(f"`{kernel}`" for kernel in KERNELS), _kernel_lines()),
    "schedules": (_MASKS_IN_WORDS, _schedule_lines()),
}

RUNTIME = {
    "every schedule and dtype between 2, 3 and 4 processes (gloo)":
        r"runtime/comm/test_gloo.py::test_every_schedule_and_dtype",
    "every schedule over NCCL and copy engines, with `cudnn`, `aten`, `reference`; 2, 3, 4 GPUs":
        r"runtime/comm/test_nccl.py::test_every_schedule_and_kernel",
    "random shapes under load, NCCL and copy engines": r"runtime/comm/test_nccl.py::test_random_shapes_under_load",
    "the host is never waited for": r"runtime/comm/test_nccl.py::test_the_loop_never_synchronises",
    "`cuda_graph=True`, replayed with other inputs": r"runtime/comm/test_nccl.py::test_a_captured_attention",
    "one GPU as 2 to 8 ranks: `flash4`, `triton`, `aten`, `cudnn`; every schedule, packs":
        r"runtime/execute/test_together_gpu.py::test_kernels_are_exact",
    "options drawn at random, many at once: masks, packs, sinks, caps, ALiBi, heads exchanged, every checkpoint":
        r"runtime/test_combinations.py::test_options_drawn",
    "copy engines against every interleaving (a model of them)":
        r"runtime/comm/test_copy_engine.py::test_any_interleaving",
    "head counts that do not divide among ranks": r"runtime/comm/test_gloo.py::test_head_counts_need_not_divide",
    "either backward payload, delta or out": r"runtime/execute/test_together.py::test_both_backward_payloads",
    "`wire_dtype=\"float32\"`": r"runtime/execute/test_together.py::test_a_float32_wire",
    "deterministic gradients between ranks":
        r"runtime/comm/test_(gloo|nccl).py::test_deterministic",
    "packed documents between processes": r"runtime/comm/test_(gloo|nccl)_varlen.py::test_random",
    "packs planned ahead by data-loader workers": r"runtime/test_ahead.py::test_a_pack_that_a_worker_has_planned",
    "heads exchanged around a schedule (`ulysses_degree`)":
        r"runtime/execute/test_ulysses.py::test_(every_schedule_layout_and_mask|it_is_exact_over_nccl)",
    "attention sinks and their gradient": r"runtime/execute/test_sinks.py::test_sinks_and_their_summed_gradient",
    "sinks with packed documents": r"runtime/execute/test_sinks.py::test_packed_documents_have_sinks",
    "ALiBi between processes, packs among it": r"runtime/execute/test_alibi.py::test_the_public_functions",
    "ALiBi with every schedule and layout, plain and packed":
        r"runtime/execute/test_alibi.py::test_(every_schedule_is_exact|packed_documents)",
    "rematerialization between ranks": r"(remat/test_attention|runtime/comm/test_nccl).py::test_remat",
    "what is kept, in host memory (`remat_offload`)":
        r"remat/test_offload.py::test_(gradients_are_the_same|on_a_gpu_memory_falls)",
    "`torch.compile`": r"runtime/test_compile.py::test_compilers_trace",
    "ranks that disagree are told how": r"runtime/agreement/test_agreement.py::test_every_rank_is_told",
}  # fmt: skip

_PARITY = r"megatron/test_parity.py::test_both_layouts_with_and_without_remat_train_like_one_rank"
MEGATRON = {
    "CP 2, 3, 4; layouts `contiguous`, `boundary`; recomputation ours and none": _PARITY + r"\[cp",
    "TP 2 x CP 2 with sequence parallelism, the same": _PARITY + r"\[tp2",
    "PP 2 x CP 2, the same": _PARITY + r"\[pp2",
    "interleaved pipeline, PP 2 x VP 2 x CP 2": r"megatron/test_parity.py::test_interleaved_pipeline",
    "layout `zigzag`, CP 3": r"megatron/test_parity.py::test_zigzag_layout",
    "TP 2 without sequence parallelism": r"megatron/test_parity.py::test_tensor_parallelism_without",
    "recomputation full, block, uniform; Megatron's own or ours": r"megatron/test_parity.py::test_what_is_recomputed",
    "CP 2: distributed optimizer, experts (EP 2), selective recomputation, offload":
        r"megatron/test_composition.py::test_two_ranks",
    "CP 2 x DP 2, EP 2; fewer key/value groups than TP": r"megatron/test_composition.py::test_four_ranks",
    "experts in every other layer": r"megatron/test_parity.py::test_experts",
    "multi-token prediction": r"megatron/test_parity.py::test_prediction_layers",
    "windows; packed documents; both; CP 1, 2, 3": r"megatron/test_packed.py::test_context_parallel_ranks",
    "packs in windows, TP 2 x CP 2 and PP 2 x CP 2": r"megatron/test_packed.py::test_packs_in_windows_train_with",
    "learned and fixed softmax offsets; every layout, TP 2 x CP 2": r"megatron/test_softmax_offset.py::test_(two|with)",
    "multimodal rotary embeddings, layout `zigzag`, CP 2": r"megatron/test_multimodal_rotary.py::test_two_ranks",
    "routing recorded and replayed, CP 2 and TP 2 x CP 2": r"megatron/test_outside.py::test_routing",
    "hidden states of layers between, CP 2 and TP 2 x CP 2": r"megatron/test_outside.py::test_hidden",
    "heads exchanged, CP 4 as 2 x 2": r"megatron/test_head_exchange.py::test_it_trains",
    "latent attention; every layout, CP 2 and 3": r"megatron/test_latent.py::test_every_layout_trains",
    "latent attention, PP 2 x CP 2": r"megatron/test_latent.py::test_pipelines_train",
    "PyTorch's and Megatron's fully sharded parameters (FSDP)": r"megatron/test_sharded.py::test_\w+s_fsdp_trains",
    "hybrid (Mamba) stacks": r"megatron/test_hybrid.py::test_a_hybrid_stack_equals",
    "checkpoints to and from Megatron's own attention": r"megatron/test_checkpoints.py::test_",
    "Megatron's training package through the launcher": r"megatron/test_launch.py::test_a_script_on_megatrons_own",
    "packed data of Megatron's scripts and datasets": r"megatron/test_packed_scripts.py::test_packed_data_of_a_script",
    "2 GPUs: CP, DDP, distributed optimizer, offload, float32": r"megatron/test_gpu.py::test_every.*\[.*-2\]",
    "4 GPUs: CP, TP, PP, VP, DP, distributed optimizer, offload": r"megatron/test_gpu.py::test_every.*\[.*-4\]",
    "2 GPUs: packed documents, CP 2": r"megatron/test_gpu.py::test_packed_documents\w+\[.*-2\]",
    "4 GPUs: packed documents, CP 4 and TP 2 x CP 2": r"megatron/test_gpu.py::test_packed_documents\w+\[.*-4\]",
    "2 GPUs: fully sharded parameters (FSDP); latent attention": (
        r"megatron/test_gpu.py::test_(sharded_parameters|latent_attention)\w+\[.*-2\]"
    ),
    "4 GPUs: fully sharded parameters (FSDP); latent attention": (
        r"megatron/test_gpu.py::test_(sharded_parameters|latent_attention)\w+\[.*-4\]"
    ),
    "Transformer Engine's modules around ours, bfloat16 and fp8; 1 and 2 GPUs": (
        r"megatron/test_transformer_engine.py::test_among"
    ),
    "what is not supported is refused by name": r"megatron/test_refusals.py::test_a_config_that_would_be",
}  # fmt: skip

DEEPSPEED = {
    "ZeRO 0 to 3, gradients of one process; sequences over 1 to 4 ranks, the rest data parallel":
        r"deepspeed/test_gradients.py::test_gradients_are",
    "gradient accumulation and clipping": r"deepspeed/test_engine.py::test_accumulation",
    "bfloat16": r"deepspeed/test_engine.py::test_bfloat16",
    "rematerialization under ZeRO 3": r"deepspeed/test_engine.py::test_under_zero_3",
    "every form of checkpointing, to the bit; with PEFT": r"deepspeed/test_checkpointing.py::test_every_form",
    "offload of optimizer and parameters, `zero.Init`": r"deepspeed/test_state.py::test_offload",
    "save, load, other numbers of ranks per sequence": r"deepspeed/test_state.py::test_a_loaded_run",
    "universal checkpoints": r"deepspeed/test_state.py::test_a_universal",
    "pipelines": r"deepspeed/test_pipeline.py::test_a_pipeline",
    "attention sinks, ZeRO 0 and 3": r"deepspeed/test_gradients.py::test_learned_sinks",
    "packed documents": r"deepspeed/test_packed.py::test_gradients_of_a_pack",
    "Hugging Face Trainer, every ZeRO stage": r"deepspeed/test_trainer.py::test_trainer_has",
    "ALST's tiled MLP and loss": r"deepspeed/test_alst.py::test_tiled",
    "every shipped configuration file learns": r"deepspeed/test_files.py::test_the_loss_falls",
    "contradictions in the file are refused by name": r"deepspeed/test_block.py::test_a_contradiction",
}  # fmt: skip

MODELS = {
    f"{_models()}: logits, loss, gradients": r"huggingface/test_parity.py::test_logits",
    "the same, packed documents": r"huggingface/test_packed.py::test_logits",
    "more ranks than heads": r"huggingface/test_parity.py::test_more_ranks",
    "rematerialization": r"huggingface/test_batch.py::test_rematerialization",
    "autocast": r"huggingface/test_autocast.py::test_logits",
    "models that are not supported are refused": r"huggingface/test_refusals.py::test_",
}

PLACES: dict[str, tuple[str, dict[str, str]]] = {
    "runtime": ("torch", RUNTIME),
    "megatron": ("megatron-core", MEGATRON),
    "deepspeed": ("deepspeed", DEEPSPEED),
    "models": ("transformers", MODELS),
}


def patterns() -> list[str]:
    """Every pattern of the page."""
    of_grids = [p for _, lines in GRIDS.values() for cells in lines.values() for p in cells if p]
    return of_grids + [p for _, lines in PLACES.values() for p in lines.values()]

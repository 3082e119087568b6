"""Train toy models of NeMo Automodel on one process, document by document, and on ranks: .ci/automodel.sh."""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder
from torch.distributed.device_mesh import init_device_mesh

from automodel_cp import distribute
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.recurrence.token_loop import delta_rule
from tests.support.state_kernels import l2norm
from tests.support.workers import run_ranks

MODELS = "nemo_automodel.components.models."
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
ROUTED = {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA = ROUTED | {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7, "head_dim": 8, "top_k_experts": 2,
    "global_head_dim": 16, "num_key_value_heads": 2, "num_global_key_value_heads": 2, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
KIMI = LATENT | {
    "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0, "use_full_rank_gate": True,
    }, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16,
    "first_k_dense_replace": 1, "mla_use_nope": True, "q_lora_rank": None, "kda_use_fused_gate": False,
}  # fmt: skip
GLM = LATENT | ROUTED | {
    "q_lora_rank": 16, "indexer_types": ["full", "shared"] * 2, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    "index_topk": 9, "index_head_dim": 16, "index_n_heads": 12, "rope_parameters": {"rope_theta": 1e4},
}  # fmt: skip
MIMO = ROUTED | {
    "num_key_value_heads": 2, "head_dim": 12, "v_head_dim": 8, "swa_num_attention_heads": 4, "swa_head_dim": 12,
    "swa_num_key_value_heads": 1, "swa_v_head_dim": 8, "sliding_window": 7, "hybrid_layer_pattern": [0, 1, 1, 0],
}  # fmt: skip
QWEN = ROUTED | {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 2, "head_dim": 16,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_key_value_heads": 2,
    "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 16,
}  # fmt: skip
BUILD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma4_moe/dense": ("Gemma4ForConditionalGeneration", "Gemma4TextConfig", GEMMA),
    "gemma4_moe": ("Gemma4ForConditionalGeneration", "Gemma4TextConfig", GEMMA | {"enable_moe_block": True}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", GLM),
    "kimi_k3": ("KimiK3ForCausalLM", "KimiK3TextConfig", KIMI | {"attn_res_block_size": 2}),
    "kimi_linear": ("KimiLinear48BForCausalLM", "KimiLinear48BConfig", KIMI),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", MIMO),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", QWEN),
}


class Conv(torch.nn.Conv1d):
    def __init__(self, hidden_size: int, kernel_size: int, **_: Any) -> None:
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)

    def forward(self, x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return F.silu(super().forward(F.pad(x.mT, (self.kernel_size[0] - 1, 0)))).mT, None


class Norm(torch.nn.RMSNorm):
    def __init__(self, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * gate.sigmoid()


def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, use_qk_l2norm_in_kernel: bool = True, **given: Any) -> Any:
    """Compute FLA's gated delta rule, or Kimi's, token by token."""
    x = {"q": l2norm(q) * k.shape[3] ** -0.5, "k": l2norm(k), "v": v, "g": g, "beta": beta}
    ends = () if given.get("cu_seqlens") is None else tuple(given["cu_seqlens"].tolist())
    return delta_rule(x, given.get("initial_state"), ends)


def build(name: str) -> Any:
    """Return a model with the same weights on every rank: float64, but for what Automodel computes in float32."""
    torch.manual_seed(0)
    kind, config, fields = BUILD[name]
    module = import_module(MODELS + name.partition("/")[0] + ".model")
    given = module if hasattr(module, "_make_missing") else import_module(MODELS + name + ".config")
    made = getattr(given, config)(**SIZES, **fields, torch_dtype="float32")
    made = module.Gemma4Config(text_config=made, vision_config=None) if "gemma4" in name else made
    module.ShortConvolution, module.FusedRMSNormGated, module.chunk_kda = Conv, Norm, rule  # Kimi's, of FLA
    model = getattr(module, kind)(made).double().train()
    for layer in model.modules():
        if hasattr(layer, "chunk_gated_delta_rule"):
            layer.chunk_gated_delta_rule = rule
    with torch.no_grad():
        for key, x in [*model.named_parameters(), *model.named_buffers()]:
            if x.is_floating_point() and "freq" not in key and "layer_scalar" not in key:
                x.normal_(0.5 if "norm" in key else 0.0, 0.15)
    return model


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Return a batch as Automodel's collaters make it; in odd steps its second row is a pack, with padding behind."""
    ids = torch.randint(1, 96, (2, 53), generator=torch.Generator().manual_seed(step))
    of = torch.ones_like(ids)
    of[1] = torch.tensor([1] * 17 + [2] + [3] * 24 + [0] * 11) if step % 2 else 1
    counts = (row.unique_consecutive(return_counts=True)[1] for row in of)
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in counts])
    labels = ids.roll(-1, 1).masked_fill(of == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": of, "position_ids": places}


def pieces(model: Any, mesh: Any, batch: dict[str, Any]) -> Any:
    """Yield logits and labels: of each document by itself on one rank, and on several of this rank's part."""
    if mesh.size() == 1:
        for row, of in enumerate(batch["attention_mask"]):
            for its in (of == document for document in range(1, int(of.max()) + 1)):
                yield model(batch["input_ids"][row : row + 1, its]).logits[0], batch["labels"][row, its]
    else:
        _, batch = ContextParallelSharder(model, mesh, batch).shard(batch)
        labels = batch.pop("labels")
        yield model(**batch).logits.flatten(0, 1), labels.flatten()


def train(rank: int, ranks: int, names: list[str]) -> dict[str, list[float]]:
    """Return the losses and the norms of the gradients of every model."""
    mesh, seen = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), {name: list[float]() for name in names}
    for name, told in seen.items():
        model = distribute(build(name), mesh["cp"])
        optimizer = torch.optim.SGD(weights := [x for x in model.parameters() if x.requires_grad], 0.05)
        for step in range(4):
            count = int(((batch := batch_of(step))["labels"] != -100).sum())
            loss = sum(F.cross_entropy(*pair, reduction="sum") for pair in pieces(model, mesh, batch)) / count
            optimizer.zero_grad()
            loss.backward()
            for x in (loss := loss.detach(), *(x.grad for x in weights if x.grad is not None)):
                dist.all_reduce(x)
            told += [float(loss), float(torch.nn.utils.clip_grad_norm_(weights, 1.0))]
            optimizer.step()
    return seen


def refused(rank: int, ranks: int) -> dict[str, str]:
    """Return what `distribute`, the cut and attention say of what they refuse."""
    mesh, told = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)), dict[str, str]()

    def refuses(what: str, call: Any) -> None:
        try:
            call()
        except UnsupportedError as error:
            told[what] = str(error)

    def changed(name: str, value: Any, at: str = "") -> Any:
        model = build("gemma4_moe/dense")
        setattr(model.get_submodule(at), name, value)
        return functools.partial(distribute, model, mesh["cp"])

    language = next(name for name, x in build("gemma4_moe/dense").named_modules() if name.endswith("layers.0"))
    refuses("backend.attn='te'", changed("backend", SimpleNamespace(attn="te")))
    refuses("MTP", changed("mtp", torch.nn.Linear(1, 1)))
    refuses("layers {'Linear'}", changed("self_attn", torch.nn.Linear(1, 1), language))
    refuses("both directions", changed("is_causal", False, language + ".self_attn"))
    model = distribute(build("gemma4_moe/dense"), mesh["cp"])
    refuses("two calls", lambda: distribute(model, mesh["cp"]))
    for what, more in {
        "pixel_values": {"pixel_values": torch.zeros(1)},
        "a mask of four dimensions": {"attention_mask": torch.ones(2, 1, 53, 53)},
        "cu_seqlens without seq_lens": {"attention_mask": None, "cu_seqlens": torch.tensor([0, 53])},
    }.items():
        batch = {key: x for key, x in (batch_of(0) | more).items() if x is not None}
        refuses(what, lambda batch=batch: ContextParallelSharder(model, mesh, batch).shard(batch))
    for layer in model.modules():
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.1
    _, batch = ContextParallelSharder(model, mesh, batch_of(0)).shard(batch_of(0))
    refuses("dropout", lambda: model(**batch))
    return told


def check_refusals() -> None:
    """Each of the example's refusals names what it refuses, on two ranks."""
    for told in run_ranks(2, refused, timeout=3600.0):
        assert all(what in text for what, text in told.items()), told
        assert len(told) == 9, told


if __name__ == "__main__":
    check_refusals()
    one, *several = (run_ranks(n, train, sys.argv[1:] or [*BUILD], timeout=3600.0)[0] for n in (1, 2, 3))
    for name, told in one.items():
        off = [max(abs(x / y - 1) for x, y in zip(found[name], told, strict=True)) for found in several]
        print(f"{name:14}", *(f"{x:.4f}" for x in told), " off by", *(f"{x:.1e}" for x in off))
        assert max(off) < 2e-5, several

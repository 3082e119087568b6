"""Train six toy models of NeMo Automodel on one process and on ranks: .ci/automodel.sh."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from automodel_cp import distribute
from tests.support.workers import run_ranks

MODELS = "nemo_automodel.components.models."
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
KIMI = {
    "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0, "use_full_rank_gate": True,
    },
    "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "mla_use_nope": True, "q_lora_rank": None, "kda_use_fused_gate": False,
}  # fmt: skip


class Conv(torch.nn.Module):
    """FLA's short convolution, of documents one by one."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, 1, kernel_size))

    def forward(self, x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        channels, _, width = self.weight.shape
        x = F.pad(x.transpose(1, 2), (width - 1, 0))
        return F.silu(F.conv1d(x, self.weight, groups=channels)).transpose(1, 2), None


class Norm(torch.nn.Module):
    """FLA's gated norm."""

    def __init__(self, hidden_size: int, eps: float, activation: str, dtype: Any = None) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * gate.sigmoid()


def chunk_kda(  # noqa: PLR0913
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Any = None, safe_gate: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """FLA's Kimi delta attention, token by token."""
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        states = [None] * (len(ends) - 1) if initial_state is None else initial_state.split(1)
        parts = [
            chunk_kda(*(x[:, lo:hi] for x in (q, k, v, g, beta)), state, True, use_qk_l2norm_in_kernel)
            for lo, hi, state in zip(ends[:-1], ends[1:], states, strict=True)
        ]
        return torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, out = initial_state, []
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    for at in range(q.shape[1]):
        state = state * g[:, at].exp()[..., None]
        new = (v[:, at] - (k[:, at][..., None] * state).sum(-2)) * beta[:, at][..., None]
        state = state + k[:, at][..., None] * new[..., None, :]
        out.append((q[:, at][..., None] * state).sum(-2) * q.shape[3] ** -0.5)
    return torch.stack(out, 1), state


def gated_rule(query: Any, key: Any, value: Any, *, g: Any, **given: Any) -> Any:
    """FLA's gated delta rule, by the names of transformers."""
    return chunk_kda(query, key, value, g[..., None], **given)


def _on_cpu(module: Any) -> None:
    module.ShortConvolution, module.FusedRMSNormGated, module.chunk_kda = Conv, Norm, chunk_kda


def _gemma4(experts: bool) -> Any:
    from transformers import Gemma4Config, Gemma4TextConfig

    module = importlib.import_module(MODELS + "gemma4_moe.model")
    text = Gemma4TextConfig(
        **SIZES, head_dim=8, global_head_dim=16, num_key_value_heads=2, num_global_key_value_heads=2, sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
        enable_moe_block=experts, num_experts=4, top_k_experts=2, moe_intermediate_size=16, vocab_size_per_layer_input=96,
        torch_dtype="float32", pad_token_id=0,
    )  # fmt: skip
    return module.Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=None, audio_config=None))


def _glm() -> Any:
    module = importlib.import_module(MODELS + "glm_moe_dsa.model")
    config = importlib.import_module(MODELS + "glm_moe_dsa.config").GlmMoeDsaConfig(
        **SIZES, **EXPERTS, **LATENT, q_lora_rank=16, n_routed_experts=4, index_topk=9, index_head_dim=16,
        index_n_heads=12, indexer_types=["full", "shared", "full", "shared"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
        torch_dtype="float32",
    )  # fmt: skip
    return module.GlmMoeDsaForCausalLM(config)


def _kimi_k3() -> Any:
    module = importlib.import_module(MODELS + "kimi_k3.model")
    _on_cpu(module)
    config = importlib.import_module(MODELS + "kimi_k3.config").KimiK3TextConfig(
        **SIZES, **LATENT, **KIMI, routed_expert_hidden_size=16, attn_res_block_size=2, torch_dtype="float32"
    )
    return module.KimiK3ForCausalLM(config)


def _kimi_linear() -> Any:
    module = importlib.import_module(MODELS + "kimi_linear.model")
    _on_cpu(module)
    config = importlib.import_module(MODELS + "kimi_linear.config").KimiLinear48BConfig(
        **SIZES, **LATENT, **KIMI, torch_dtype="float32"
    )
    return module.KimiLinear48BForCausalLM(config)


def _mimo() -> Any:
    module = importlib.import_module(MODELS + "mimo_v2_flash.model")
    config = importlib.import_module(MODELS + "mimo_v2_flash.config").MiMoV2FlashConfig(
        **SIZES, **EXPERTS, n_routed_experts=4, num_key_value_heads=2, head_dim=12, v_head_dim=8,
        swa_num_attention_heads=4, swa_num_key_value_heads=1, swa_head_dim=12, swa_v_head_dim=8, sliding_window=7,
        hybrid_layer_pattern=[0, 1, 1, 0], torch_dtype="float32",
    )  # fmt: skip
    return module.MiMoV2FlashForCausalLM(config)


def _qwen3_5() -> Any:
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs

    module = importlib.import_module(MODELS + "qwen3_5_moe.model")
    model = module.Qwen3_5MoeForCausalLM(
        theirs.Qwen3_5MoeTextConfig(
            **SIZES, **EXPERTS, num_key_value_heads=2, head_dim=16, num_experts=4, shared_expert_intermediate_size=16,
            layer_types=["linear_attention"] * 3 + ["full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4, router_aux_loss_coef=0.0,
            torch_dtype="float32",
        )
    )  # fmt: skip
    for layer in model.modules():
        if hasattr(layer, "chunk_gated_delta_rule"):
            layer.chunk_gated_delta_rule = gated_rule
    return model


BUILD: dict[str, Callable[[], Any]] = {
    "gemma4": lambda: _gemma4(experts=False),
    "gemma4_moe": lambda: _gemma4(experts=True),
    "glm_moe_dsa": _glm,
    "kimi_k3": _kimi_k3,
    "kimi_linear": _kimi_linear,
    "mimo_v2_flash": _mimo,
    "qwen3_5_moe": _qwen3_5,
}

DOCUMENTS = ((53,), (17, 1, 24))
"""Of the rows of a batch of 53 tokens; the second one is a pack, behind which is padding."""


def build(name: str) -> Any:
    """Return a model with the same weights on every rank: float64, but for what Automodel computes in float32."""
    torch.manual_seed(0)
    model = BUILD[name]().double().train()
    with torch.no_grad():
        for key, x in [*model.named_parameters(), *model.named_buffers()]:
            if x.is_floating_point() and "freq" not in key and "layer_scalar" not in key:
                x.normal_(0.5 if "norm" in key else 0.0, 0.15)
    return model


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """Return a batch as Automodel's collaters make it, with documents in odd steps."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 96, (2, 53), generator=generator)
    if step % 2 == 0:
        return {"input_ids": ids, "labels": ids.roll(-1, 1)}
    documents, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, lengths in enumerate(DOCUMENTS):
        of = torch.cat([torch.full((n,), at + 1) for at, n in enumerate(lengths)])
        documents[row, : len(of)] = of
        positions[row, : len(of)] = torch.cat([torch.arange(n) for n in lengths])
    labels = ids.roll(-1, 1).masked_fill(documents == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": documents, "position_ids": positions}


def _alone(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the losses of all documents, each by itself."""
    documents = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    total = torch.zeros(())
    for row, of in enumerate(documents):
        for document in range(1, int(of.max()) + 1):
            its = of == document
            logits = model(batch["input_ids"][row : row + 1, its]).logits
            total = total + F.cross_entropy(logits.flatten(0, 1), batch["labels"][row, its], reduction="sum")
    return total


def train(rank: int, ranks: int, name: str, steps: int) -> list[tuple[float, float]]:
    """Return the loss and the norm of the gradients of every step."""
    from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder

    model = build(name)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    distribute(model, mesh["cp"])
    parameters = [x for x in model.parameters() if x.requires_grad]
    optimizer, seen = torch.optim.SGD(parameters, 0.05), []
    for step in range(steps):
        batch = batch_of(step)
        count = int((batch["labels"] != -100).sum())
        if ranks == 1:
            loss = _alone(model, batch) / count
        else:
            context, batch = ContextParallelSharder(model, mesh, batch).shard(batch)
            labels = batch.pop("labels")
            with context():
                logits = model(**batch).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        for x in (loss, *(x.grad for x in parameters if x.grad is not None)):
            dist.all_reduce(x)
        seen.append((float(loss), float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))))
        optimizer.step()
    return seen


def train_all(rank: int, ranks: int, names: list[str], steps: int) -> dict[str, Any]:
    """Train models one after another."""
    return {name: train(rank, ranks, name, steps) for name in names}


def main() -> None:
    """Print the losses of one process and how far ranks are from them; fail if that is more than rounding."""
    parser = argparse.ArgumentParser(prog="python -m tests.examples.automodel_models", description=__doc__)
    parser.add_argument("names", nargs="*", default=[*BUILD])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()
    one, *several = (run_ranks(n, train_all, asked.names, asked.steps, timeout=3600.0)[0] for n in (1, *asked.ranks))
    for name, steps in one.items():
        off = [
            max(abs(x / y - 1) for a, b in zip(found[name], steps, strict=True) for x, y in zip(a, b, strict=True))
            for found in several
        ]
        print(f"{name:14}", *(f"{loss:.5f} ({norm:.4f})" for loss, norm in steps), *(f"{x:.1e}" for x in off))
        assert max(off) < 1e-5, several


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

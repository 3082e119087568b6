"""A random training step of Megatron-Core: drawn from a seed and a number, so that both say all of it."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import torch

from dfa_megatron.sharding import tree_positions
from tests.fuzz.frameworks import uneven
from tests.fuzz.outcome import Draw
from tests.megatron import attends
from tests.support.packs import random_offsets

VOCABULARY, PAIRS = 62, ("tree", "mask")
TOPOLOGIES: tuple[dict[str, int], ...] = (
    *({"cp": 2}, {"cp": 2}, {"cp": 2}, {"cp": 3}, {"cp": 3}, {"cp": 4}, {"cp": 2, "ep": 2}, {"cp": 3, "ep": 3}),
    *({"tp": 2}, {"pp": 2}, {"pp": 2, "vp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "cp": 2}),
    *(
        {"pp": 2, "cp": 2}, {"pp": 2, "vp": 2, "cp": 2}, {"cp": 2, "dp": 2}, {"cp": 2, "dp": 2, "ep": 2},
        {"cp": 4, "ep": 2},
    ),
)  # fmt: skip
"""On 2 to 4 ranks; sizes that are not named are 1."""


LIMITS = {"float64": 4e-6, "float64 beside float32": 5e-5, "float32": 1e-4, "float32 of few layers": 1e-5}
"""By what a draw computes in. Megatron makes its loss and rotary tables in float32."""


@dataclass(frozen=True, kw_only=True)
class MegatronDraw(Draw):
    """One training step of all its ranks.

    options: of `MegatronConfig`, None for Megatron's own attention. config: fields of TransformerConfig. model:
    arguments of its class. layers: "" of a GPT, "delta" or "kimi" of one with such nets, or a hybrid model's pattern.
    micro_batches: of each data-parallel rank. pack: "", "rows" (documents in rows that are cut), "padded" (each
    document padded and cut zigzag by itself), "tree" or "mask" of all rows. masks: of every micro-batch, by
    `uneven.counted`, for so many `parts`. padding_mask: given to the model, which its experts heed. routing: "replay",
    "record" or "". warm: steps before the one that counts, after each of which the optimizer moves the weights, where
    there is one. optimizer: "", "torch" (PyTorch's Adam), "megatron", or "distributed" (over data ranks). wrapper: see
    `sharded.wrap`. dtype: what it computes in, of `LIMITS`. name: of one that nobody drew.
    """

    over = "megatron"
    seed: int = 0
    number: int = 0
    tp: int = 1
    pp: int = 1
    vp: int | None = None
    cp: int = 1
    dp: int = 1
    ep: int = 1
    options: dict[str, Any] | None
    config: dict[str, Any]
    model: dict[str, Any]
    layers: str = ""
    batch: int = 2
    tokens: int = 48
    micro_batches: int = 1
    pack: str = ""
    masks: tuple[str, ...] = ("holes",)
    parts: int = 2
    padding_mask: bool = False
    routing: str = ""
    overlap: bool = False
    warm: int = 0
    optimizer: str = ""
    wrapper: str = "ddp"
    dtype: str = "float64"
    name: str = ""

    @property
    def ranks(self) -> int:
        """Return how many ranks run it."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def has_documents(self) -> bool:
        """Return whether rows are documents, which form one row."""
        return self.pack in ("rows", "padded")

    @property
    def start(self) -> tuple[int, ...]:
        """Return what Megatron's process groups depend on."""
        return self.tp, self.pp, self.vp or 0, self.cp, self.dp, self.ep

    @property
    def layout(self) -> str:
        """Return the layout of its tokens."""
        return str((self.options or {}).get("data_layout", "contiguous"))

    @property
    def limit(self) -> float:
        """Return how far a number may be off, as a share of the largest."""
        return LIMITS[self.dtype]

    @property
    def line(self) -> str:
        """Return the command that runs it again, or its name."""
        return self.name or super().line

    def alone(self, **beside: int) -> MegatronDraw:
        """Return the same step of Megatron's own attention on one rank, or with the sizes `beside`."""
        ours = ("recompute", "distribute_saved", "use_mamba_mem_eff_path", "overlap_moe", "bf16")
        config = {name: x for name, x in self.config.items() if not name.startswith(ours)}
        sizes = {**dict.fromkeys(("tp", "pp", "cp", "dp", "ep"), 1), "vp": None, **beside}
        micro_batches = len(self.masks) // sizes["dp"]  # type: ignore[operator]
        plain = {"overlap": False, "wrapper": "ddp", "optimizer": self.optimizer and "torch"}
        changes: dict[str, Any] = {**sizes, **plain, "micro_batches": micro_batches, "options": None}
        name = self.name and f"{self.name.partition(':')[0]} alone"  # the same for all that are compared with it
        return dataclasses.replace(self, config={**config, "sequence_parallel": False}, name=name, **changes)

    def global_batch(self, step: int) -> tuple[dict[str, Any], ...]:
        """Return every micro-batch of a step, whole: (batch, tokens) each, and offsets of documents (batch, n)."""
        return tuple(self._micro_batch(step, number) for number in range(len(self.masks)))

    @property
    def padded(self) -> int:
        """Return the tokens of every pack whose documents are padded, which a pipeline wants to be the same."""
        unit, longest = 2 * self.cp, 0
        for batch in (batch for step in range(self.warm + 1) for batch in self.global_batch(step)):
            rooms = [-(-n // unit) * unit for n in batch["cu_seqlens"].diff().flatten().tolist()]
            longest = max(longest, sum(rooms) + unit)
        return -(-longest // (unit * self.tp)) * unit * self.tp

    def _offsets(self, dice: random.Random) -> tuple[int, ...]:
        if not self.name:
            return random_offsets(self.tokens, dice, 24)
        inner = dice.sample(range(1, self.tokens), 4)
        inner[1] = inner[0] + 1  # a document of one token; with another one it may leave an empty document
        return (0, *sorted(inner), self.tokens, self.tokens)

    def _micro_batch(self, step: int, number: int) -> dict[str, Any]:
        seed = hash((self.seed, self.number, step, number)) % 2**31
        generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
        text = torch.randint(VOCABULARY, (self.batch, self.tokens + 1), generator=generator)
        cuts = [self._offsets(dice) if self.has_documents else (0, self.tokens) for _ in range(self.batch)]
        counts = uneven.counted(self.masks[number], self.batch, self.tokens, self.parts, seed)
        longest = max(map(len, cuts))
        places, seen = uneven.positions(cuts), dict[str, Any]()
        if self.pack == "tree":
            tree = attends.forest(dice, self.tokens)
            seen["prompt_tree"] = tree if number % 2 else (list(tree.lengths), torch.tensor(tree.parents))
            places = tree_positions(tree.lengths, tree.parents).expand(self.batch, -1)
        elif self.pack == "mask":
            seen["mask"], rows = attends.masked(dice, self.tokens)
            places = rows.expand(self.batch, -1).contiguous()
        if self.model["position_embedding_type"] == "mrope":
            places = attends.image_places(self.batch, self.tokens)
        return {
            **seen, "tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(),
            "loss_mask": counts.float(), "position_ids": places,
            "cu_seqlens": torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in cuts]).int(),
        }  # fmt: skip


def draw(seed: int, number: int) -> MegatronDraw:
    """Draw the step of that number: equal arguments give equal draws."""
    dice = random.Random(f"megatron {seed} {number}")
    sizes: dict[str, Any] = dice.choice(TOPOLOGIES)
    tp, vp, cp, dp = (sizes.get(name, 1) for name in ("tp", "vp", "cp", "dp"))
    layout = dice.choice(["contiguous", "contiguous", "boundary", "boundary", "zigzag"])
    config = _config(dice, sizes)
    others = {"mtp_num_layers", "kv_lora_rank"} & {*config}
    pack = dice.choice(["", "", "rows", "rows", "padded", *(() if others or "window_size" in config else PAIRS)])
    if pack == "padded" and (layout != "boundary" or cp == 1):
        pack = "rows"
    micro_batches = dice.choice([2, 4]) if vp > 1 else dice.choice([1, 1, 2, 3])
    tokens = 2 * cp * dice.choice([1, 1, 2, 3, 4, 5, 7])
    if config.get("mtp_num_layers") or (pack and vp > 1):
        tokens = max(tokens, 8 * cp)
    delta_nets = layout != "zigzag" and tp == 1 and not others and pack not in PAIRS and dice.random() < 0.15
    if delta_nets:
        config["num_layers"] = 2 * sizes.get("pp", 1) * vp
        config |= {"recompute_method": "uniform"} if config.get("recompute_granularity") == "full" else {}
        config |= {"moe_layer_freq": 1} if "num_moe_experts" in config else {}
    options = _options(dice, layout, config, cp)
    _fit(options, config, sizes, pack)
    kinds = [*uneven.MASKS] if "mtp_num_layers" in config else [*uneven.MASKS, "nothing"]
    experts = "num_moe_experts" in config
    model, shares = _model(dice, config, sizes)
    return MegatronDraw(
        seed=seed,
        number=number,
        **sizes,
        options=options,
        layers="delta" if delta_nets else "",
        config=config,
        model=model,
        batch=dice.choice([1, 2, 2, 3]),
        tokens=tokens,
        micro_batches=micro_batches,
        pack=pack,
        masks=tuple(dice.choice(kinds) for _ in range(micro_batches * dp)),
        parts=cp,
        padding_mask=experts and (pack == "padded" or dice.random() < 0.5),
        # Megatron's overlapped reduction fails at a second step where stages share embeddings so.
        overlap=dice.random() < 0.2 and not shares,
        warm=0 if config.get("moe_router_load_balancing_type") == "global_aux_loss" else dice.choice([0, 0, 0, 1, 2]),
    )


def _fit(options: dict[str, Any], config: dict[str, Any], sizes: dict[str, int], pack: str) -> None:
    """Change options that Megatron, or some ranks alone, would refuse."""
    if pack and "mtp_num_layers" in config and config.get("recompute_granularity") == "full":
        options["checkpoint"] = "auto"  # Megatron's own recomputation of prediction layers takes no packs
    if sizes.get("pp", 1) > 1 and options["kernel"] == "cpu" and config.get("v_head_dim", 12) != 12:
        options["kernel"] = "auto"  # the first stage refuses its first call, while the next one waits for hidden states
    if sizes.get("pp", 1) * sizes.get("dp", 1) > 1 and pack == "mask":
        options["schedule"] = "auto"  # likewise, where a schedule is for causal work
    if sizes.get("pp", 1) > 1 and config.get("recompute_method") == "block" and "num_moe_experts" in config:
        options["checkpoint"] = "auto"  # as for a padding_mask that Megatron would lose


def _model(dice: random.Random, config: dict[str, Any], sizes: dict[str, int]) -> tuple[dict[str, Any], bool]:
    """Return arguments of the model, and whether its stages share embeddings with prediction layers."""
    # Megatron's own gradient of learned positions lacks the prediction layers' share where stages share them.
    learned = ["learned_absolute"] if "mtp_num_layers" not in config or sizes.get("pp", 1) == 1 else []
    model = {
        "position_embedding_type": dice.choice(["rope", "rope", "none", *learned]),
        "rotary_percent": dice.choice([1.0, 1.0, 0.5]),
        "share_embeddings_and_output_weights": dice.random() < 0.4,
    }
    shares = model["share_embeddings_and_output_weights"] and "mtp_num_layers" in config and sizes.get("pp", 1) > 1
    return model, bool(shares)


def _config(dice: random.Random, sizes: dict[str, int]) -> dict[str, Any]:
    tp, stages = sizes.get("tp", 1), sizes.get("pp", 1) * sizes.get("vp", 1)
    groups = tp * dice.choice([1, 1, 2, 3])
    heads = groups * dice.choice([1, 2, 3])
    layers = stages * dice.choice([1, 2] if stages == 1 else [1])
    norm = dice.choice(["RMSNorm", "RMSNorm", "LayerNorm"])
    config: dict[str, Any] = {
        "num_layers": layers, "hidden_size": dice.choice([16, 24]), "num_attention_heads": heads,
        "num_query_groups": groups, "kv_channels": dice.choice([4, 8, 8, 12]), "ffn_hidden_size": dice.choice([16, 40]),
        "normalization": norm, "gated_linear_unit": dice.random() < 0.5, "add_bias_linear": dice.random() < 0.3,
        "add_qkv_bias": dice.random() < 0.3, "qk_layernorm": dice.random() < 0.3,
        "calculate_per_token_loss": dice.random() < 0.5, "sequence_parallel": tp > 1,
    }  # fmt: skip
    if tp == 1 and dice.random() < 0.1:
        config |= _latent(dice, heads)
        config["qk_layernorm"] &= config["q_lora_rank"] is not None  # Megatron 0.19 refuses the norm without
    elif dice.random() < 0.2:
        config |= {"window_size": (dice.choice([1, 3, 9]), 0), "window_attn_skip_freq": dice.choice([None, 2])}
    if "kv_lora_rank" not in config and dice.random() < 0.2:
        config |= {"softmax_type": dice.choice(["learnable", "off-by-one"])}
    if sizes.get("ep", 1) > 1 or dice.random() < 0.3:
        config |= _experts(dice, sizes, layers) | {"add_bias_linear": False}
        config["calculate_per_token_loss"] = dice.random() < 0.3
    if dice.random() < 0.2 and (tp == 1 or "num_moe_experts" not in config):
        config |= {"mtp_num_layers": dice.choice([1, 2]), "mtp_loss_scaling_factor": 0.5}
        config["sequence_parallel"] = False  # Megatron's own norms around these layers' projection refuse it
    if dice.random() < 0.5:
        config |= _recompute(dice, layers // stages, config)
    return config


def _latent(dice: random.Random, heads: int) -> dict[str, Any]:
    return {
        "num_query_groups": heads, "q_lora_rank": dice.choice([None, 12]), "kv_lora_rank": 10, "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4, "v_head_dim": dice.choice([6, 8, 12]), "rope_type": "rope", "add_bias_linear": False,
        "add_qkv_bias": False,
    }  # fmt: skip


def _experts(dice: random.Random, sizes: dict[str, int], layers: int) -> dict[str, Any]:
    # That of the global batch depends on every data-parallel rank's tokens, and on the steps before.
    everywhere = ["global_aux_loss"] if sizes.get("dp", 1) == 1 else []
    balance = dice.choice(["none", "aux_loss", "aux_loss", "seq_aux_loss", *everywhere])
    found: dict[str, Any] = {
        "num_moe_experts": sizes.get("ep", 1) * dice.choice([1, 2]) * (2 if sizes.get("ep", 1) == 1 else 1),
        "moe_router_topk": dice.choice([1, 2]), "moe_ffn_hidden_size": 16,
        "moe_layer_freq": dice.choice([1, [n % 2 for n in range(layers)]] if layers > 1 else [1]),
        "moe_token_dispatcher_type": dice.choice(["allgather", "alltoall"]), "moe_router_load_balancing_type": balance,
        "moe_aux_loss_coeff": 0.0 if balance == "none" else 0.1, "moe_router_pre_softmax": True,
    }  # fmt: skip
    if sizes.get("ep", 1) > 1:
        found |= {"moe_token_dispatcher_type": "allgather"}  # the other moves its counts from GPUs alone
    if dice.random() < 0.5:
        found |= {"moe_z_loss_coeff": 0.05}
    if dice.random() < 0.2:
        found |= {"moe_shared_expert_intermediate_size": 16}
    if dice.random() < 0.2:
        found |= {"moe_router_score_function": "sigmoid"}
    return found


def _recompute(dice: random.Random, layers: int, config: dict[str, Any]) -> dict[str, Any]:
    kind = dice.choice(["uniform", "uniform", "block", "selective"])
    # Megatron's own recomputed MLP does not end where it has a bias; its recomputed norms need Transformer Engine.
    modules = ["moe"] if "num_moe_experts" in config else [] if config["add_bias_linear"] else ["mlp"]
    if kind == "selective":
        if not modules:
            return {}
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    # Megatron's own recomputed prediction layers want 1.
    many = 1 if "mtp_num_layers" in config else dice.randint(1, layers)
    return {"recompute_granularity": "full", "recompute_method": kind, "recompute_num_layers": many}


def _options(dice: random.Random, layout: str, config: dict[str, Any], cp: int) -> dict[str, Any]:
    selective = config.get("recompute_granularity") == "selective"
    checkpoint = dice.choice(["auto", "auto", "none"] if selective else ["auto", "auto", "none", "remat"])
    full = config.get("recompute_granularity") == "full" or checkpoint == "remat"
    schedules = ["auto", "auto", "ring", "balanced", "balanced_shared", "greedy"]
    return {
        "data_layout": layout, "schedule": "auto" if layout == "zigzag" else dice.choice(schedules),
        "checkpoint": checkpoint, "remat_offload": full and checkpoint != "none" and dice.random() < 0.2,
        "loss_tile": dice.choice(["off", "off", 1, 3, 4096]),
        "kernel": dice.choice(["auto", "auto", "reference", "cpu"]), "verify": dice.choice(["on", "on", "off"]),
        "ulysses_degree": dice.choice([1, "auto", "auto", cp if config["num_attention_heads"] % cp == 0 else 1]),
    }  # fmt: skip

"""Distributed attention for DeepSpeed, driven by one block of its JSON.

from dfa_megatron import deepspeed as dfa_ds

engine, *_ = dfa_ds.initialize(args=args, model=model, model_parameters=model.parameters())
mesh = dfa_ds.mesh_of(engine)               # whole batches: those of mesh.data_rank of mesh.data_size
loss = engine(**batch).loss                 # or dfa_ds.loss(logits, batch["labels"], group=mesh.group)
engine.backward(loss)
"""

from dfa_megatron.deepspeed.checkpointing import checkpoint
from dfa_megatron.deepspeed.engine import before_initialize, mesh_of
from dfa_megatron.deepspeed.initialize import initialize
from dfa_megatron.deepspeed.install import install, uninstall
from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.deepspeed.proved_engine import prove
from dfa_megatron.huggingface.distribute import local_attention
from dfa_megatron.huggingface.loss import causal_lm_loss as loss
from dfa_megatron.huggingface.loss import tiled_loss
from dfa_megatron.huggingface.mesh import Mesh, make_mesh

__all__ = [
    "KEY",
    "DeepSpeedOptions",
    "Mesh",
    "before_initialize",
    "checkpoint",
    "initialize",
    "install",
    "local_attention",
    "loss",
    "make_mesh",
    "mesh_of",
    "prove",
    "tiled_loss",
    "uninstall",
]

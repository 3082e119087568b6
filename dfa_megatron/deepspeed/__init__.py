"""Distributed attention for DeepSpeed, driven by one block of its JSON.

from dfa_megatron import deepspeed as dfa_ds

engine, *_ = dfa_ds.initialize(args=args, model=model, model_parameters=model.parameters())
mesh = dfa_ds.mesh_of(engine)               # batches: rank mesh.data_rank of mesh.data_size
batch = dfa_ds.shard_batch(whole_batch, group=mesh.group)
loss = engine(**batch).loss                 # or dfa_ds.loss(logits, batch["shift_labels"], group=mesh.group)
engine.backward(loss)
"""

from dfa_megatron.deepspeed.accelerate import install, uninstall
from dfa_megatron.deepspeed.checkpointing import checkpoint
from dfa_megatron.deepspeed.engine import before_initialize
from dfa_megatron.deepspeed.initialize import initialize
from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.deepspeed.mesh import Mesh, make_mesh, mesh_of
from dfa_megatron.deepspeed.proved_engine import prove
from dfa_megatron.huggingface.batch import shard_batch
from dfa_megatron.huggingface.distribute import local_attention
from dfa_megatron.huggingface.loss import causal_lm_loss as loss
from dfa_megatron.huggingface.loss import tiled_loss

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
    "shard_batch",
    "tiled_loss",
    "uninstall",
]

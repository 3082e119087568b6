"""Arguments and tensors that are refused while a model runs."""

from __future__ import annotations

from dfa_megatron.megatron.refusals.model_config import BOUNDARY
from dfa_megatron.refusals import Refusal, Stage, stated

CALLS = Stage(
    "Megatron: while a model runs",
    (
        stated(
            "attention_mask",
            "an attention_mask tensor",
            "attention is causal by construction and would ignore the tensor",
            "attention_mask=None, which in Megatron's scripts is --no-create-attention-mask-in-dataloader; documents "
            "are described by packed_seq_params",
        ),
        stated(
            "lost_mask",
            "padding_mask beside experts with --recompute-method block and --dfa-remat off",
            "Megatron's own recomputation loses the mask of the layers that it does not recompute",
            "--recompute-method uniform, or --dfa-remat auto",
        ),
        stated(
            "attention_bias",
            "attention_bias",
            "the block kernels take no bias",
            "rotary or learned positions",
        ),
        stated(
            "inference_context",
            "an inference context of dynamic batching, or of several context-parallel ranks",
            "a rank would cache the keys of its own tokens only",
            "a static one with --context-parallel-size 1, or evaluation on whole sequences",
        ),
        stated(
            "mixer_cache",
            "an inference context in a Mamba mixer or gated delta net of several context-parallel ranks",
            "its states are not kept from call to call",
            "--context-parallel-size 1, or evaluation on whole sequences",
        ),
        stated(
            "swapped_group",
            "a model whose groups were replaced after it was built ({swapped_group})",
            "its layers would follow the new ones in part, and mistake the order of the tokens",
            "local_cp_size and cp_group in packed_seq_params, a second model, or the groups of its construction",
            "cp_group",
        ),
        Refusal(
            lambda a: a.attn_mask_type not in (None, "causal"),
            "attn_mask_type={attn_mask_type!r} at a call",
            "only causal attention is computed",
            "a layer spec whose self_attention has params={{'attn_mask_type': AttnMaskType.causal}}",
            {"attn_mask_type": "padding"},
        ),
        stated(
            "unknown_argument",
            "the argument {unknown_argument} at a call of core attention",
            "this package does not know its meaning",
            "leaving it unset",
            "num_splits=4",
        ),
        stated(
            "rolled",
            "roll_tensor with shifts and dims {rolled}",
            "tokens move by one to the left, in the last dimension",
            "shifts=-1, dims=-1",
            (-2, -1),
        ),
        stated(
            "roll_argument",
            "roll_tensor with {roll_argument}",
            "this package does not know its meaning",
            "Megatron's own order of the tokens: --dfa-data-layout boundary, without packs",
            "new_argument",
        ),
        stated(
            "key_cache",
            "attention of {key_cache[0]} rows over {key_cache[1]}",
            "there is no key cache: every rank holds as many queries as keys",
            "training and evaluation on whole sequences",
            (1, 8),
        ),
        stated(
            "unplaced_pack",
            "packed_seq_params for core attention by itself",
            "Megatron's rotary embeddings of packed tokens assume its zigzag order of every document",
            "the layers of distribute_attention, which give every token its own",
        ),
        Refusal(
            lambda a: a.pack_rows not in (None, 1),
            "packed documents in {pack_rows} rows",
            "a pack is one row of tokens",
            "a batch from shard_batch",
            {"pack_rows": 2},
        ),
        Refusal(
            lambda a: a.table_shape and a.table_shape[0] != a.rows,
            "a rotary table of shape {table_shape} for {rows} tokens of a rank",
            "its first dimension must be these tokens, because they change places",
            "a table (tokens, 1, 1, rotary_dim) or a tuple of such, or --dfa-data-layout zigzag",
            {"table_shape": (2, 1, 1, 8), "rows": 4},
        ),
        stated(
            "no_door",
            "layers outside a language model in data_layout='boundary'",
            "tokens come in order where they enter Megatron's LanguageModule (GPTModel, HybridModel, MambaModel)",
            "such a model; or data_layout='contiguous' with batches of shard_batch, or 'zigzag'",
        ),
        stated(
            "extracted",
            "the block's argument {extracted} in data_layout='boundary'",
            "the tokens between layers are in another order than the caller's",
            "data_layout='contiguous' with batches of shard_batch, or 'zigzag'",
            "extract_layer_indices",
        ),
        stated(
            "unnamed",
            "arguments by place of {unnamed}.forward",
            "it does not name them, and those of tokens must change their order",
            "arguments by name",
            "GPTModel",
        ),
        stated(
            "no_output",
            "a model without labels that did not call its output layer, in data_layout='boundary'",
            "hidden states go back into the caller's order before that layer",
            "labels, post_process=False, or data_layout='contiguous'",
        ),
        stated(
            "other_result",
            "a language model that returns {other_result} in data_layout='boundary'",
            "its tensors of tokens would stay in the order of the layers",
            "tensors, or tuples and dictionaries of such; or data_layout='contiguous'",
            "CausalLMOutput",
        ),
    ),
    BOUNDARY,
)

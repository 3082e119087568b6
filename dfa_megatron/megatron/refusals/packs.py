"""Batches and packed documents that are refused, when they are cut and when the first of them arrives."""

from __future__ import annotations

from dfa_megatron.megatron.refusals.model_config import BOUNDARY, several_ranks
from dfa_megatron.refusals import Refusal, Stage, stated

BATCHES = Stage(
    "Megatron: when a batch is cut",
    (
        stated(
            "mask_in_batch",
            "attention_mask in a batch",
            "attention is causal over the whole row, or over each document of cu_seqlens",
            "attention_mask=None (Megatron's scripts: --no-create-attention-mask-in-dataloader)",
        ),
        stated(
            "odd_entry",
            "the entry {odd_entry} of a batch, {form}",
            "entries are cut along their tokens",
            "tensors (batch, seq, ...), and others apart from the batch",
            "sample_id",
            form=(2,),
        ),
        Refusal(
            lambda a: a.row_tokens and a.parts and a.row_tokens % a.parts,
            "a row of {row_tokens} tokens without cu_seqlens",
            "Megatron cuts its tables of positions into 2 x CP = {parts} parts",
            "a length that 2 x CP divides, or packed documents",
            {"row_tokens": 62, "parts": 4},
        ),
        Refusal(
            lambda a: a.offsets_shape and (len(a.offsets_shape) != 2 or a.offsets_shape[0] != a.rows),
            "cu_seqlens of shape {offsets_shape} with {rows} rows",
            "it holds offsets into each row",
            "({rows}, documents + 1)",
            {"offsets_shape": (2, 5), "rows": 3},
        ),
        Refusal(
            lambda a: a.declared not in (None, "contiguous", "zigzag"),
            "the batch layout {declared!r}",
            "there is no such layout",
            "contiguous or zigzag",
            {"declared": "boundary"},
        ),
        Refusal(
            lambda a: a.sliced and a.sliced != a.needed,
            "data_layout={dfa_data_layout!r} on batches that are sliced {sliced}",
            "the layers would mistake the order of the tokens",
            "dfa_megatron.megatron.shard_batch with the model's options, declare_batch_layout where your own code "
            "slices, or data_layout='boundary' for Megatron's own batches",
            {"sliced": "contiguous"},
        ),
        stated(
            "uncut",
            "a batch of {uncut} tokens on a rank that `shard_batch` did not cut",
            "each rank would take the whole of it for its own part of a longer sequence",
            "shard_batch for every batch, of evaluation too; or declare_batch_layout where your own code slices",
            4096,
        ),
        stated(
            "unknown_pack",
            "documents that `packed_seq_params` did not make, after batches that `shard_batch` cut",
            "a trainer's own packs are cut document by document, and would be read as a row that was cut whole",
            "packed_seq_params(batch) of the batch that shard_batch cut; or no shard_batch in this process, or "
            "declare_batch_layout(cp_group, 'zigzag') where your own code slices whole rows",
        ),
        stated(
            "uncut_positions",
            "position_ids that count from 0 to {uncut_positions} on a rank, in layout {dfa_data_layout!r}",
            "nobody cut the batch, and each rank would take the whole of it for its own part; or they are not the cut "
            "positions of the tokens",
            "get_batch_on_this_cp_rank or shard_batch for every entry of every batch; or declare_batch_layout where "
            "your own code slices",
            4096,
        ),
        Refusal(
            lambda a: a.axes_tokens != a.all_tokens,
            "position_ids of {axes_tokens} tokens in three axes",
            "Megatron's module slices the table that it makes of all {all_tokens} tokens of the ranks",
            "position_ids (3, batch, {all_tokens}), as shard_batch leaves them",
            {"axes_tokens": 16, "all_tokens": 32},
        ),
        stated(
            "other_samples",
            "different samples on the ranks of a context-parallel group",
            "each rank would hold a part of another sequence",
            "the same whole batch on all of them: a sampler that counts data-parallel ranks alone",
        ),
        stated(
            "unsliced_documents",
            "packed documents in data_layout={dfa_data_layout!r} that nobody is known to have sliced by rows",
            "Megatron slices them one by one, each in zigzag order, with TransformerEngine's help",
            "--dfa-data-layout boundary, dfa_megatron.megatron.shard_batch with the model's options, or "
            "declare_batch_layout(cp_group, 'zigzag') where your own code slices whole rows",
        ),
    ),
    BOUNDARY,
)

PACKS = Stage(
    "Megatron: when packed documents arrive",
    (
        Refusal(
            lambda a: several_ranks(a) and (a.hybrid_stack or a.is_hybrid_model) and a.dfa_data_layout == "zigzag",
            "packed documents in a hybrid model in layout {dfa_data_layout!r}",
            "its other layers rely on Megatron's zigzag order of every document",
            "--dfa-data-layout boundary or contiguous",
            {"context_parallel_size": 2, "hybrid_stack": True, "dfa_data_layout": "zigzag"},
        ),
        Refusal(
            lambda a: a.samples_in_pack is not None and "seq_aux_loss" in (a.moe_router_load_balancing_type or ()),
            "moe_router_load_balancing_type={moe_router_load_balancing_type!r} with {samples_in_pack} samples in a "
            "pack",
            "the loss is of each sample, and a rank does not hold all tokens of a sample",
            "--micro-batch-size 1, or --moe-router-load-balancing-type aux_loss",
            {"moe_router_load_balancing_type": "seq_aux_loss", "samples_in_pack": 2},
        ),
        Refusal(
            lambda a: a.qkv_format not in (None, "thd") and not (a.qkv_format == "sbhd" and a.one_with_group),
            "packed_seq_params in format {qkv_format!r}",
            "every pack is one row of tokens",
            "format 'thd'; 'sbhd' is for one document with a cp_group of its own",
            {"qkv_format": "sbhd"},
        ),
        stated(
            "no_offsets",
            "packed_seq_params without {no_offsets}",
            "the ends of the documents are unknown",
            "cu_seqlens_q and cu_seqlens_kv",
            "cu_seqlens_kv",
        ),
        stated(
            "other_keys",
            "packed_seq_params with cu_seqlens_kv other than cu_seqlens_q",
            "queries and keys must come from the same documents",
            "the same for both",
        ),
        stated(
            "short_padding",
            "packed_seq_params with and without padding: {short_padding}",
            "every document must fit its padded length",
            "as many offsets in both, with no document longer than it is padded",
            "cu_seqlens (0, 5, 9) and cu_seqlens (0, 4, 12)",
        ),
        Refusal(
            lambda a: a.uneven_document is not None,
            "a document of {uneven_document} tokens, padding included, cut zigzag by itself",
            "its length must be a multiple of 2 x CP = {multiple}",
            "cu_seqlens_q_padded; or declare_batch_layout(cp_group, 'zigzag') where whole rows are cut",
            {"uneven_document": 6, "multiple": 4},
        ),
        Refusal(
            lambda a: a.padded_tokens != a.held_tokens,
            "packed documents of {padded_tokens} tokens, padding included",
            "the ranks hold {held_tokens} tokens together",
            "offsets whose last one is {held_tokens}",
            {"padded_tokens": 12, "held_tokens": 16},
        ),
        Refusal(
            lambda a: a.partition not in (None, "zigzag"),
            "packed_seq_params with cp_partition_mode={partition!r} that nobody is known to have sliced",
            "documents are taken as cut zigzag one by one",
            "cp_partition_mode='zigzag'",
            {"partition": "contiguous"},
        ),
        stated(
            "cut_images",
            "a multimodal table of a rank's tokens, in attention not Megatron's, with documents cut one by one",
            "nobody tells the order of its rows",
            "the table of all tokens with padding, or dfa_megatron.megatron.shard_batch with the model's options",
        ),
        Refusal(
            lambda a: a.longest_document is not None and a.longest_document > (a.max_seqlen or 0),
            "packed_seq_params with max_seqlen {max_seqlen}",
            "a document has {longest_document} tokens, and the last ones would have no rotary embedding",
            "max_seqlen_q={longest_document}",
            {"longest_document": 8, "max_seqlen": 6},
        ),
        stated(
            "no_pack_params",
            "a pipeline stage that was given no packed_seq_params",
            "the script's data are packed documents, and attention here would not stop at their ends",
            "at most two pipeline stages, or scripts of Megatron-Core 0.17 and later",
        ),
    ),
    BOUNDARY,
)

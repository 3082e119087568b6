"""Batches that are refused when they are cut."""

from __future__ import annotations

from dfa_megatron.refusals import Stage, stated

SHARD = "dfa_megatron.huggingface.shard_batch"

BATCHES = Stage(
    "Hugging Face: when a batch is cut",
    (
        stated(
            "unknown_batch",
            "a batch of {unknown_batch}",
            "it is not known how to cut it",
            "input_ids and labels; others by hand",
            "input_ids, pixel_values",
        ),
        stated(
            "wrong_documents",
            "position_ids that are not those of documents",
            "each document, and so each row, must begin at 0 and go up by 1",
            "as DataCollatorWithFlattening of transformers makes them, or none for one document a sequence",
        ),
        stated(
            "different_batches",
            "batches that differ between the ranks of a sequence",
            "each rank takes its part of the same batch",
            "the same samples on every rank of a group: a DistributedSampler with num_replicas and rank of the groups, "
            "not of all ranks; loaders prepared after distribute_accelerator; the same data set, collator and seed",
        ),
        stated(
            "per_token",
            "{per_token} beside the tokens of a shared batch",
            "they would stay whole, or take the place of what is made for this rank's part",
            "input_ids and labels, of which shift_labels are made",
            "shift_labels",
        ),
        stated(
            "some_rows",
            "logits_to_keep of shared batches, which generate() asks for too",
            "each rank would keep its own part's, and generation needs the keys of whole sequences on one rank",
            "logits_to_keep=0; or model.generate within dfa_megatron.huggingface.local_attention(model)",
        ),
        stated(
            "two_answers",
            "cu_seq_lens_q that disagree with position_ids",
            "they say where documents begin in two ways",
            "one of them",
        ),
        stated(
            "other_keys",
            "cu_seq_lens_k other than cu_seq_lens_q",
            "queries and keys must be of the same documents",
            "the same",
        ),
        stated(
            "offsets",
            "cu_seq_lens_q {offsets}",
            "it must hold the offsets of documents in {rows} rows of {length} tokens, those of all ranks",
            f"the batches of {SHARD}, which makes it of position_ids",
            "from 0 to 7",
            rows=1,
            length=8,
        ),
        stated(
            "beside_tree",
            "a prompt_tree beside {beside_tree}",
            "it says by itself which tokens attend to which, and where they are; images are not planned in it",
            "the tree alone",
            "position_ids",
        ),
        stated(
            "wrong_tree",
            "a prompt_tree whose segments do not fit",
            "{wrong_tree}",
            "(lengths, parents) of a whole row, as dfa_megatron.masks.prompt_tree takes them",
            "they have 7 tokens, and a row has 8",
        ),
        stated(
            "mask_values",
            "an attention_mask with other values than 0 and 1",
            "transformers takes each of them for a token to attend to: numbered documents would see each other, and "
            "what is added to scores would not be",
            "1 for tokens and 0 for padding; position_ids that begin at 0 in each document, or cu_seq_lens_q",
        ),
        stated(
            "left_padding",
            "an attention_mask with padding that is not on the right",
            "padded tokens would be attended to",
            "tokenizer.padding_side='right', or sequences without padding",
        ),
        stated(
            "padded_labels",
            "labels of padded tokens",
            "an attention that masks padding would give them another output",
            "the label -100 for padding, as transformers' collators write it",
        ),
    ),
)

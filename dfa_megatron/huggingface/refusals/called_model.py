"""Inputs and calls of a transformers model that are refused."""

from __future__ import annotations

from dfa_megatron.huggingface.refusals.cut_batch import SHARD
from dfa_megatron.refusals import Refusal, Stage, stated

_CAUSAL = "causal self-attention over whole, unpadded sequences"
_LOSS = f"{SHARD}, or no labels and causal_lm_loss on the logits"

INPUTS = Stage(
    "Hugging Face: when a model is called",
    (
        stated(
            "own_parallelism",
            "distribute_attention beside ParallelismConfig(cp_size={own_parallelism}) of accelerate",
            "accelerate would drop the masks of layers, and cut batches a second time",
            "distribute_accelerator(accelerator, model), or distribute_trainer(trainer)",
            2,
        ),
        Refusal(
            lambda a: a.kind and a.router_loss,
            "{kind} with a loss of its router (output_router_logits)",
            "it would balance the experts over this rank's part of a sequence",
            "output_router_logits=False",
            {"kind": "a call", "router_loss": True},
        ),
        stated(
            "positional",
            "positional arguments after input_ids",
            "positions and caches are looked for by name",
            "keyword arguments",
        ),
        stated(
            "key_cache",
            "a key cache",
            "ranks hold parts of the sequence",
            "use_cache=False, or generation within dfa_megatron.huggingface.local_attention(model)",
        ),
        stated(
            "output_attentions", "output_attentions", "attention weights are never in memory", "output_attentions=False"
        ),
        stated(
            "outer_masks",
            "masks made by the model around this one",
            "they may let tokens see others in ways of their own",
            "distribute_attention of the whole model, if its masks are causal but for the images of Gemma 3 and 4",
        ),
        stated(
            "other_senses",
            "{other_senses} on {ranks} ranks",
            "images and sound belong to the whole sequence, and this rank holds a part of its tokens",
            "distribute_attention of the whole model, which embeds whole sequences and then cuts them",
            "pixel_values",
            ranks=2,
        ),
        stated(
            "whole_batch",
            "a batch with images or sound for a model of text",
            "shard_batch leaves the tokens of such a batch whole, for a model of several parts",
            "a batch of text alone, or distribute_attention of the whole model of several parts",
        ),
        stated(
            "embedded",
            "inputs_embeds, or no input_ids, for a model of several parts",
            "the ranks compare their tokens, so that each is known to have the whole sequences",
            "input_ids",
        ),
        stated(
            "other_tokens",
            "other input_ids than those of another of {ranks} ranks",
            "a model of several parts embeds whole sequences on every rank, and its decoder's are cut",
            f"{SHARD} of a batch with pixel_values, mm_token_type_ids or the like, the same on every rank",
            ranks=2,
        ),
        stated(
            "uncut",
            "{uncut} for the decoder of a model of several parts",
            "it is not known whether they have the tokens of the whole sequence",
            "a model that hands on inputs_embeds, position_ids and the features of images alone",
            "cross_attention_states",
        ),
        stated(
            "no_positions",
            "a batch without position_ids on {no_positions} ranks",
            "each rank takes its part of a sequence, and the batch does not show that it is a part",
            f"{SHARD}, which brings them",
            2,
        ),
        stated(
            "axes",
            "position_ids of shape {axes}",
            "the tokens of images have positions along several axes, and beside them a token's place in the sequence "
            "must be known",
            "position_ids (4, batch, seq): the places, as shard_batch cuts them, and the axes, cut alike; or "
            "input_ids of text",
            "(3, 1, 8) for a qwen2_vl_text model",
        ),
        stated(
            "no_tree",
            "a prompt_tree for {no_tree}",
            "tokens of one path would be taken for those of another",
            "a distributed model of text whose positions are counted from 0",
            "a model with its own attention",
        ),
        stated(
            "wrong_positions",
            "position_ids {wrong_positions}",
            "this rank holds the tokens {first} to {last} of each sequence, and every sequence, or every document in "
            "it, must begin at position 0 and go up by 1, across the ranks",
            f"the position_ids of {SHARD}, or of dfa_megatron.local_positions",
            "from 8 to 15 of shape (1, 8)",
            first=0,
            last=7,
        ),
        stated(
            "local_part",
            "a batch of shard_batch with local attention",
            "it is this rank's part of sequences that {local_part} ranks share, and attention would end with the part",
            "whole sequences within local_attention, and in evaluation under accelerate; or distributed attention, in "
            "model.train() within torch.no_grad() under accelerate",
            2,
        ),
        stated(
            "part_in_evaluation",
            "position_ids {part_in_evaluation} in evaluation",
            "attention is local there under accelerate, and this is a part of a sequence that was cut over the ranks, "
            "as by loaders that are prepared together with the model",
            "the evaluation loader prepared alone, accelerator.prepare(loader), which leaves sequences whole; or "
            "model.train() within torch.no_grad(), for a model without dropout",
            "from 8 to 15",
        ),
        stated(
            "own_loss",
            "labels for a model of type {own_loss}",
            "its loss is a mean over the tokens of this rank, not of all",
            "no labels, and causal_lm_loss on its logits",
            "BartForCausalLM",
        ),
        stated(
            "no_shift_labels",
            "labels without shift_labels",
            "the model would shift them and lose a token at every boundary between ranks",
            _LOSS,
        ),
        stated(
            "no_item_count",
            "labels without num_items_in_batch",
            "the model would take the mean over the tokens of this rank, not of all",
            _LOSS,
        ),
        stated(
            "hidden_tokens",
            "an attention_mask with padding",
            "padded tokens would be attended to",
            "padding on the right, which is checked and removed before the layers see it",
        ),
        stated(
            "rows_apart",
            "rows with documents of other lengths in a roformer model",
            "its table of positions is of one row",
            "one row a batch, or documents that begin at the same places in each",
        ),
        stated(
            "other_mask",
            "a mask beyond causal and sliding window",
            "prefixes and blocks are not planned, and verify='off' does not see packed documents; under torch.compile "
            "transformers asks for such a mask whatever the batch",
            f"{_CAUSAL}, in a model that is not compiled",
        ),
    ),
)

ATTENTION = Stage(
    "Hugging Face: when a layer computes attention",
    (
        stated(
            "unprepared",
            "attention implementation 'dfa' on a model that was not prepared",
            "the layer does not know the process group",
            "dfa_megatron.huggingface.distribute_attention(model, group=...)",
        ),
        stated(
            "dropout",
            "attention dropout {dropout}",
            "the block kernels have no dropout",
            "config.attention_dropout=0.0",
            0.1,
        ),
        stated("not_causal", "attention that is not causal", "models are distributed with a causal mask", _CAUSAL),
        stated(
            "key_cache",
            "attention of {key_cache[0]} tokens over {key_cache[1]}",
            "there is no key cache: every rank holds as many queries as keys",
            "with dfa_megatron.huggingface.local_attention(model), on whole sequences",
            (1, 8),
        ),
        stated(
            "position_bias",
            "position_bias in a layer of type {layer}",
            "the block kernels take no bias",
            _CAUSAL,
            True,
            layer="T5Attention",
        ),
        stated(
            "head_mask",
            "head_mask in a layer of type {layer}",
            "the block kernels mask no heads",
            _CAUSAL,
            True,
            layer="GPT2Attention",
        ),
        stated(
            "not_passed",
            "{not_passed} in a layer of type {layer}",
            "the layer does not hand it to its attention implementation",
            "a layer that passes softcap and s_aux, as those of Gemma 2 and GPT-OSS do",
            "sinks",
            layer="OtherAttention",
        ),
        stated(
            "in_tree",
            "a prompt_tree in a layer of type {layer} with {in_tree}",
            "it counts places in the pack, where a token's neighbours may be of another path",
            "layers of full attention and rotary embeddings; or every path as a document of its own",
            "a window",
            layer="MistralAttention",
        ),
        stated("ready_mask", "a ready-made attention mask", "attention is causal by construction", _CAUSAL),
        stated(
            "lost_in_recompute",
            "a layer of type {layer} that runs again in the backward",
            "the function that checkpoints it does not tell it the documents, or whether its attention was local",
            "checkpoint='full' or 'remat' of DistAttentionConfig, which does",
            layer="JambaMambaMixer",
        ),
        stated(
            "some_rows",
            "logits_to_keep in a model whose layers share keys",
            "the layers that share them would have fewer queries than keys",
            "logits_to_keep=0",
        ),
        stated(
            "chunk",
            "chunks of {chunk} tokens in a layer of type {layer} whose mask has {mask_window}",
            "attention implementations would differ in which tokens are visible",
            "attention_chunk_size as in the model's masks",
            8192,
            layer="Llama4TextAttention",
            mask_window="none",
        ),
        stated(
            "window",
            "sliding_window={window} in a layer of type {layer} whose mask has {mask_window}",
            "attention implementations would differ in which tokens are visible",
            "a window of one token or more that the layer's mask has, or no sliding_window",
            "4",
            layer="Qwen2Attention",
            mask_window="no window",
        ),
    ),
)

"""What accelerate and a Trainer ask for that is refused when sequences are shared without DeepSpeed."""

from __future__ import annotations

from dfa_megatron.refusals import Refusal, Stage, stated

ACCELERATOR = Stage(
    "Hugging Face: when an accelerate loop or a Trainer is distributed",
    (
        stated(
            "uneven_size",
            "size={uneven_size} on {ranks} ranks",
            "groups of that many ranks do not use all of them",
            "a divisor of {ranks}",
            "3",
            ranks=4,
        ),
        stated(
            "two_sizes",
            "size={two_sizes} beside ParallelismConfig(cp_size={cp_size})",
            "the ranks of cp share each sequence",
            "one of them",
            4,
            cp_size=2,
        ),
        stated(
            "other_size",
            "size={other_size} for a second model",
            "the accelerator's loaders give one batch to {known_size} ranks",
            "the same size for all models of an accelerator",
            4,
            known_size=2,
        ),
        stated(
            "other_parallelism",
            "ParallelismConfig({other_parallelism}) without DeepSpeed",
            "accelerate would cut the batches or the model too",
            "a ParallelismConfig of cp_size and dp sizes, or none",
            "tp_size=2",
        ),
        stated(
            "deepspeed",
            "distribute_accelerator or distribute_trainer with DeepSpeed",
            "its engine finds the ranks of a sequence in the JSON",
            "dfa_megatron.deepspeed.install() and ParallelismConfig(sp_size=..., sp_backend='deepspeed')",
        ),
        stated(
            "dispatched",
            "dispatch_batches=True",
            "the first rank would hand the ranks of a sequence different batches",
            "dispatch_batches=False, or None",
        ),
        stated(
            "streamed",
            "evaluation on data without a length, by several groups of ranks",
            "what repeats to fill the last batch could not be told apart",
            "a data set with a length, or size of all ranks",
        ),
        stated(
            "compiled",
            "torch_compile, or the dynamo backend {compiled!r} of accelerate",
            "transformers then asks for masks that are not planned",
            "no dynamo_backend, torch_compile=False",
            "inductor",
        ),
        stated(
            "prepared",
            "distribute_accelerator behind accelerator.prepare",
            "its loaders would give the ranks of a sequence different batches, and schedulers step once for each rank",
            "the call before prepare",
        ),
        stated(
            "split",
            "split_between_processes of an accelerator whose ranks share sequences",
            "the ranks of a sequence would get different inputs",
            "a loader of accelerator.prepare",
        ),
        stated(
            "objects",
            "gather_for_metrics of objects (use_gather_object, eval_use_gather_object)",
            "what the ranks of a sequence hold in common could not be told apart",
            "tensors",
        ),
    ),
)

TRAINER = Stage(
    "Hugging Face: when a Trainer is distributed",
    (
        stated(
            "new_models",
            "model_init",
            "the Trainer makes another model when it trains, which would not be distributed",
            "Trainer(model=...)",
        ),
        stated(
            "own_loss",
            "label_smoothing_factor or compute_loss_func",
            "they would compare the labels of all tokens with the logits of this rank's",
            "the model's own loss",
        ),
        stated(
            "other_loss",
            "{other_loss}",
            "what it makes of logits or log-probabilities would be of this rank's tokens alone, and training wrong",
            "Trainer or SFTTrainer, or distribute_accelerator and a loop of your own over the model's loss",
            "DPOTrainer.compute_loss",
        ),
        stated(
            "tokens_seen",
            "include_num_input_tokens_seen with this version of transformers",
            "its loop counts each token once on every rank of its sequence",
            "transformers 5.23, or include_num_input_tokens_seen='no'",
        ),
        stated(
            "rebalanced",
            "train_sampling_strategy='batch_rebalance'",
            "it would give each rank of a sequence another batch",
            "'random', 'sequential' or 'group_by_length'",
        ),
        stated(
            "generates",
            "predict_with_generate",
            "generation needs the keys of whole sequences on one rank",
            "evaluation without it, or model.generate within dfa_megatron.huggingface.local_attention(model)",
        ),
        Refusal(
            lambda a: a.checkpointed and a.dfa_checkpoint != "none",
            "gradient_checkpointing=True with checkpoint={dfa_checkpoint!r}",
            "the Trainer would replace one by the other when it trains",
            "gradient_checkpointing=False",
            {"checkpointed": True, "dfa_checkpoint": "remat"},
        ),
    ),
)

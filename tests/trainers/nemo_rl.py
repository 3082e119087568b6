"""Compare NeMo-RL's forward and loss on packs, two ranks to a sequence with our attention, with its own at CP 1.

    git clone https://github.com/NVIDIA-NeMo/RL FOLDER   # commit 7ea279a; with Megatron-Core 0.19
    python -m tests.trainers.nemo_rl FOLDER

CI does not run this: NeMo-RL brings ray, and needs Transformer Engine and more, which are stubbed here. The model is
ours, because NeMo-RL's set-up needs CUDA.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch

from tests.trainers.toy import begin, build, compare, documents, gradients, stub

STUBS = (
    "megatron.bridge",
    "modelopt",
    "pynvml",
    "transformer_engine",
    "transformer_engine_torch",
    "nemo_rl.utils.logger",
)


def train(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    begin(ranks)
    stub(*STUBS, "nemo_rl.models.policy", "nemo_rl.models.generation")
    from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.megatron import data, train

    model = build(ranks, calculate_per_token_loss=True)  # as NeMo-RL demands
    tokens, lengths = documents(), torch.tensor([len(x) for x in documents()])
    rows = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    places = torch.arange(rows.shape[1])
    masks = (places < lengths[:, None]) & (places >= torch.clamp(lengths[:, None] // 2, max=4)) & (places % 5 > 0)
    whole = {"input_ids": rows, "input_lengths": lengths, "token_mask": masks.float(), "sample_mask": torch.ones(4)}
    packs = [BatchedDataDict({name: x[lo : lo + 2] for name, x in whole.items()}) for lo in (0, 2)]
    BatchedDataDict.to = lambda self, _: self
    cfg = {"sequence_packing": {"enabled": True}}
    room = 2 * ranks if ranks > 1 else 1
    reported = train.megatron_forward_backward(
        model,
        data.make_processed_microbatch_iterator(
            iter(packs), cfg, "input_lengths", room, 1, lambda **_: nullcontext(), None
        ),
        num_microbatches=2,
        seq_length=rows.shape[1],
        mbs=1,
        post_processing_fn=train.LossPostProcessor(NLLLossFn(), cfg, num_microbatches=2),
        global_valid_seqs=torch.tensor(4),
        global_valid_toks=masks[:, 1:].sum(),
    )
    return {"loss": torch.tensor([entry["loss"] for entry in reported]), **gradients(model)}


if __name__ == "__main__":
    sys.exit(compare(train))

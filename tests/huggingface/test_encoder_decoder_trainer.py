"""Trainer and Seq2SeqTrainer train and evaluate encoder-decoder models as on one process for each group of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from tests.huggingface.test_encoder_decoder import SOUND, VOCABULARY, tiny
from tests.huggingface.test_trainer import history, parameters_of, prepare_worker
from tests.support.models import TRAINING
from tests.support.workers import run_ranks

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BART": ("Bart", "Seq2SeqTrainer", {}),
    "smoothed labels": ("Bart", "Seq2SeqTrainer", {"label_smoothing_factor": 0.2}),
    "Whisper, counted on each device": ("Whisper", "Trainer", {"average_tokens_across_devices": False}),
}


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sources and targets of uneven lengths; some targets have holes, and some rows no label but one."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.count = kind, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        source, target = 7 + 5 * index % 11, 5 + 7 * index % 8
        labels = torch.randint(4, VOCABULARY, (target,), generator=generator)
        labels[1 : (1, target, 4)[index % 3]] = -100
        if self.kind == "Whisper":
            return {"labels": labels, "input_features": torch.randn(6, 2 * SOUND, generator=generator).double()}
        return {"labels": labels, "input_ids": torch.randint(4, VOCABULARY, (source,), generator=generator)}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As transformers' DataCollatorForSeq2Seq does, which makes the decoder's tokens of the labels."""
    labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    decoder = torch.nn.functional.pad(labels, (1, 0), value=2)[:, :-1]
    made = {"labels": labels, "decoder_input_ids": torch.where(decoder == -100, 1, decoder)}
    if "input_features" in samples[0]:
        return made | {"input_features": torch.stack([sample["input_features"] for sample in samples])}
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True, padding_value=1)
    return made | {"input_ids": ids, "attention_mask": (ids != 1).long()}


def hits(found: Any) -> dict[str, float]:
    right = found.predictions[0].argmax(-1) == found.label_ids
    encoded = found.predictions[1] if found.predictions[1].shape[1] == SOUND else right[:0]  # no padding
    return {"hits": float(right[found.label_ids != -100].sum()), "rows": len(right) + float(encoded.sum())}


def trainer(folder: str, case: str, data: int) -> Any:
    """A Trainer whose steps see the same samples with any number of data-parallel groups."""
    import transformers

    kind, name, changes = CASES[case]
    arguments = {
        **TRAINING,
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4 // data,
        "gradient_accumulation_steps": 4 // data,
        **changes,
    }
    given = "Seq2SeqTrainingArguments" if name == "Seq2SeqTrainer" else "TrainingArguments"
    return getattr(transformers, name)(
        model=tiny(kind),
        args=getattr(transformers, given)(**arguments),
        train_dataset=Pairs(kind, 16),
        eval_dataset=Pairs(kind, 6),
        data_collator=collate,
        compute_metrics=hits,
    )


def alone(rank: int, world_size: int, folder: str) -> list[Any]:
    if world_size > 1:  # whose losses transformers multiplies by their number, because these models ignore its count
        prepare_worker(rank, world_size)
    runs = [trainer(f"{folder}/{case}", case, world_size) for case in CASES]
    return [(run.train() and history(run), parameters_of(run)) for run in runs]


def together(rank: int, world_size: int, folder: str, size: int) -> list[Any]:
    prepare_worker(rank, world_size)
    found = []
    for number, case in enumerate(CASES if size == world_size else [*CASES][:1]):
        run = trainer(f"{folder}/{case}", case, world_size // size)
        dfa_hf.distribute_trainer(run, size=size, config=TrainingConfig(checkpoint=("remat", "none")[number % 2]))
        run.train()
        found.append((history(run), parameters_of(run)))
    run.args.predict_with_generate = True
    with pytest.raises(UnsupportedError, match="predict_with_generate"):
        dfa_hf.distribute_trainer(run, size=size)
    with pytest.raises(UnsupportedError, match="return_dict=False of shared batches"), torch.no_grad():
        run.model.eval()(**collate([run.eval_dataset[0]]), return_dict=False)
    return found


@pytest.mark.parametrize(("ranks", "size"), [(3, 3), (4, 2)])
def test_trainers_have_the_steps_and_the_evaluation_of_one_process(ranks: int, size: int, tmp_path: Any) -> None:
    wanted, *_ = run_ranks(ranks // size, alone, str(tmp_path / "one"), timeout=120)
    for found in run_ranks(ranks, together, str(tmp_path / "more"), size, timeout=170):
        for case, (mine, weights), (losses, theirs) in zip(CASES, found, wanted, strict=False):
            for name, values in losses.items():
                assert mine[name] == pytest.approx(values, rel=2e-6), f"{case}: {name}"
            rounded = 1e-5 if "smoothed" in case else 1e-9  # transformers adds smoothed losses in float32
            torch.testing.assert_close(weights, theirs, rtol=rounded, atol=rounded)

"""Compare TRL's SFTTrainer on packed documents, two ranks to a sequence, with one process.

    pip install trl && python -m tests.trainers.sft

CI does not run this: TRL brings datasets and pyarrow, of a quarter of a gigabyte. Tried with TRL 1.16.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import pytest

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from tests.huggingface.test_trainer import prepare_worker
from tests.support.models import VOCABULARY, build, text
from tests.support.workers import run_ranks

NAMES = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "eval_loss", "eval_entropy")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{word}": word for word in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    own = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>")  # noqa: S106


def documents(count: int, seed: int) -> Any:
    """Documents of 3 to 11 tokens, of which none, one or two have no label."""
    from datasets import Dataset

    rows = [text(1, 3 + 5 * index % 9, seed=seed + index, unlabelled=index % 3) for index in range(count)]
    return Dataset.from_list([{name: value[0].tolist() for name, value in row.items()} for row in rows])


def train(rank: int, ranks: int, folder: str) -> dict[str, list[float]]:
    if ranks > 1:
        prepare_worker(rank, ranks)
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=folder,
        packing=True,
        packing_strategy="bfd",
        max_length=17,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        max_steps=3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    run = SFTTrainer(
        model=build("Llama"),
        args=config,
        train_dataset=documents(30, seed=1),
        eval_dataset=documents(12, seed=100),
        processing_class=tokenizer(),
    )
    if ranks > 1:
        dfa_hf.distribute_trainer(run, config=TrainingConfig(checkpoint="remat"))
    run.train()
    return {name: [entry[name] for entry in run.state.log_history if name in entry] for name in NAMES}


def main() -> int:
    """Train both ways, and print what was equal."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        (wanted,) = run_ranks(1, train, folder, timeout=300)
        for found in run_ranks(2, train, folder, timeout=300):
            for name, values in wanted.items():
                assert values, name
                assert found[name] == pytest.approx(values, rel=1e-5), name
                print(f"{name:20} {values}", file=sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""TRL's trainers, whose ranks share sequences, log and learn what they do on one process."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from tests.huggingface.test_router_loss import EXPERTS
from tests.huggingface.test_trainer import parameters_of, prepare_worker
from tests.support.models import VOCABULARY, build, text
from tests.support.workers import preload, run_ranks

INSTALLED = importlib.util.find_spec("trl") is not None

if INSTALLED:
    preload("trl.trainer.dpo_trainer", "trl.trainer.kto_trainer", "trl.trainer.sft_trainer")

PACKED = {"packing": True, "packing_strategy": "bfd", "max_length": 17}
TIMES = ("_runtime", "_per_second", "dfa/", "total_flos")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{word}": word for word in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    own = Tokenizer(models.WordLevel(words, unk_token="w0"))  # noqa: S106
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>")  # noqa: S106


def rows(name: str, count: int) -> list[dict[str, Any]]:
    """Documents with few labels, prompts with two answers, or with one answer and whether it is good."""
    rng = random.Random(count)

    def words(least: int, most: int) -> str:
        return "".join(f" w{rng.randrange(1, VOCABULARY - 2)}" for _ in range(rng.randint(least, most)))

    if name == "SFT":
        samples = [text(1, 3 + 5 * at % 9, seed=count + at, unlabelled=at % 3) for at in range(2 * count)]
        return [{key: value[0].tolist() for key, value in sample.items()} for sample in samples]
    pairs = [{"prompt": words(1, 6), "chosen": words(1, 9), "rejected": words(1, 5)} for _ in range(count)]
    if name == "DPO":
        return pairs
    return [{"prompt": row["prompt"], "completion": row["chosen"], "label": at % 3 > 0} for at, row in enumerate(pairs)]


def save(folder: Path, name: str) -> str:
    """Save data for training, evaluation and more evaluation, where all ranks find what one of them adds."""
    from datasets import Dataset

    for count, part in ((16, "train"), (4, "eval"), (5, "more")):
        Dataset.from_list(rows(name, count)).save_to_disk(folder / part)
    return str(folder)


def train(rank: int, ranks: int, folder: str, name: str, size: int, changes: dict[str, Any]) -> Any:
    if ranks > 1:
        prepare_worker(rank, ranks)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import trl
    from datasets import load_from_disk

    data, kind = ranks // size, "Qwen3Moe" if "router_aux_loss_coef" in changes else "Llama"
    experts = {**EXPERTS, "num_experts_per_tok": 2} if kind == "Qwen3Moe" else {}
    given = {
        "output_dir": folder,
        "per_device_train_batch_size": 2 // data,
        "per_device_eval_batch_size": 2 // data,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,
        **dict.fromkeys(("use_cpu", "disable_tqdm"), True),
        **dict.fromkeys(("bf16", "gradient_checkpointing", "ddp_find_unused_parameters"), False),
        "report_to": [],
    }
    run = getattr(trl, f"{name}Trainer")(
        model=build(kind, **experts),
        args=getattr(trl, f"{name}Config")(**{**given, **changes}),
        train_dataset=load_from_disk(f"{folder}/train"),
        eval_dataset=load_from_disk(f"{folder}/eval"),
        processing_class=tokenizer(),
        **({} if name == "SFT" else {"ref_model": build(kind, seed=1, **experts)}),
    )
    if ranks > 1:
        dfa_hf.distribute_trainer(run, size=size, config=TrainingConfig(checkpoint="remat"))
    run.train()
    if getattr(run, "precompute_ref_logps", False):
        run.evaluate(load_from_disk(f"{folder}/more"))
    seen = [{k: v for k, v in entry.items() if not any(t in k for t in TIMES)} for entry in run.state.log_history]
    return seen, parameters_of(run)


@pytest.mark.skipif(not INSTALLED, reason="TRL is not installed")
@pytest.mark.parametrize(
    ("name", "ranks", "size", "changes"),
    [
        ("SFT", 2, 2, {**PACKED, "router_aux_loss_coef": 0.5}),
        ("SFT", 4, 2, {**PACKED, "eval_strategy": "no"}),
        ("DPO", 4, 2, {"beta": 0.3, "loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.4}),
        ("DPO", 3, 3, {"beta": 0.3, "router_aux_loss_coef": 0.5, "use_weighting": True}),
        ("DPO", 2, 2, {"loss_type": ["sigmoid", "sft"], "precompute_ref_log_probs": True}),
        ("KTO", 3, 3, {"beta": 0.3}),
    ],
)
def test_losses_gradients_and_what_is_logged_are_those_of_one_process(
    tmp_path: Path, name: str, ranks: int, size: int, changes: dict[str, Any]
) -> None:
    one, many = (save(tmp_path / folder, name) for folder in ("one", "many"))
    ((wanted, parameters),) = run_ranks(1, train, one, name, 1, changes, timeout=120)
    logged = {"loss", "entropy", "num_tokens", "grad_norm"} | ({"rewards/margins"} if name != "SFT" else set())
    assert logged <= wanted[0].keys()
    for found, mine in run_ranks(ranks, train, many, name, size, changes, timeout=170):
        assert len(found) == len(wanted)
        for entry, want in zip(found, wanted, strict=True):
            assert entry == pytest.approx(want, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(mine, parameters, rtol=1e-4, atol=1e-6)

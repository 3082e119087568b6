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
from dfa_megatron.huggingface import share_rollouts
from tests.fuzz.frameworks.language_models import EXPERTS
from tests.huggingface.test_trainer import parameters_of, prepare_worker
from tests.huggingface.vllm_server import Server, let_trl_find_vllm
from tests.support.models import TRAINING, VOCABULARY, build, text, with_noise
from tests.support.workers import by_turns, preload, run_ranks

INSTALLED = importlib.util.find_spec("trl") is not None

if INSTALLED:
    preload(
        *(f"trl.trainer.{name}_trainer" for name in ("distillation", "dpo", "grpo", "kto", "reward", "rloo", "sft"))
    )

PACKED = {"packing": True, "packing_strategy": "bfd", "max_length": 17}
SCORED = {"loss", "grad_norm", "num_tokens"}
LOGGED = {
    **{name: {*SCORED, "entropy"} for name in ("SFT", "RLOO", "Distillation")},
    **{name: {*SCORED, "entropy", "rewards/margins"} for name in ("DPO", "KTO")},
    "GRPO": {*SCORED, "entropy", "rows", "reward_std"},
    "Reward": {*SCORED, "accuracy", "margin", "mean_reward"},
}
ROLLOUTS = ("GRPO", "RLOO")
GENERATES = (*ROLLOUTS, "Distillation")
TIMES = ("_runtime", "_per_second", "dfa/", "total_flos", "step_time", "profiling/")


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
    if name in ("DPO", "Reward", *GENERATES):
        return pairs
    return [{"prompt": row["prompt"], "completion": row["chosen"], "label": at % 3 > 0} for at, row in enumerate(pairs)]


def save(folder: Path, name: str) -> None:
    """Save data for training, evaluation and more evaluation, where all ranks find what one of them adds."""
    from datasets import Dataset

    for count, part in ((16, "train"), (4, "eval"), (5, "more")):
        Dataset.from_list(rows(name, count)).save_to_disk(folder / part)
    if name in ROLLOUTS:
        build("Llama", seed=1).save_pretrained(folder / "reference")


def train(rank: int, ranks: int, folder: str, size: int, runs: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What each run logs, its parameters, and the tokens that it generated."""
    dfa_hf.add_cp_backend()
    if ranks > 1:
        prepare_worker(rank, ranks)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return [trained(f"{folder}/{name}", name, ranks // size, size, changes) for name, changes in runs]


def rewards(written: list[Any], other: int) -> Any:
    """Count different words, and keep all; ranks that are not the first of a group add to it, which nobody uses."""

    def reward(completion_ids: list[list[int]], log_metric: Any, **_: Any) -> list[float]:
        written.append(completion_ids)
        log_metric("rows", len(completion_ids) + other)
        return [len(set(ids)) + ids[0] / VOCABULARY + other * random.random() for ids in completion_ids]

    return reward


def models(name: str, kind: str) -> tuple[Any, dict[str, Any]]:
    """The model that a trainer trains, and the one beside it."""
    import transformers

    experts = {**EXPERTS, "num_experts": 4, "experts_implementation": "eager"} if kind == "Qwen3Moe" else {}
    model = build(kind, **experts)
    if name == "Reward":
        model.config.num_labels = 1
        model = with_noise(transformers.LlamaForSequenceClassification(model.config))
    beside = {"DPO": "ref_model", "KTO": "ref_model", "Distillation": "teacher_model"}.get(name)
    return model, {beside: build(kind, seed=1, **experts)} if beside else {}


def told(by: str, size: int) -> dict[str, Any]:
    """What accelerate is told by its config, or by the variables of its launcher."""
    from accelerate import ParallelismConfig

    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = str(by == "flags")
    if by == "flags":
        os.environ |= {"PARALLELISM_CONFIG_CP_SIZE": str(size), "PARALLELISM_CONFIG_CP_BACKEND": "dfa"}
    options = {"cp_backend": "dfa", "cp_handler": TrainingConfig(checkpoint="remat")}
    return {"parallelism_config": ParallelismConfig(cp_size=size, **options)} if by == "config" else {}


def trained(folder: str, name: str, data: int, size: int, changes: dict[str, Any]) -> Any:
    import trl
    from datasets import load_from_disk

    by = changes.get("by", "") if size > 1 else ""
    changes = {option: value for option, value in changes.items() if option != "by"}
    kind, written = "Qwen3Moe" if "router_aux_loss_coef" in changes else "Llama", list[Any]()
    model, others = models(name, kind)
    given: dict[str, Any] = {**TRAINING, "output_dir": folder, "gradient_accumulation_steps": 2, **told(by, size)}
    given |= dict.fromkeys(("bf16", "gradient_checkpointing", "ddp_find_unused_parameters"), False)
    per_device = (4 if name in ("KTO", *GENERATES) else 2) // data
    if name in ROLLOUTS:
        model.config._name_or_path = f"{folder}/reference"  # from where TRL takes it
        others["reward_funcs"] = rewards(written, int(os.environ.get("RANK", "0")) % size)
        given["num_generations"] = 2
    if name in GENERATES:
        given |= {"max_completion_length": 7, "gradient_checkpointing": True}
    server = Server() if "use_vllm" in changes and int(os.environ.get("RANK", "0")) == 0 else None
    if "use_vllm" in changes:
        let_trl_find_vllm()
        given["vllm_server_base_url"] = "http://127.0.0.1:9" if server is None else server.url  # one rank may ask
    given |= {f"per_device_{each}_batch_size": per_device for each in ("train", "eval")}
    run = getattr(trl, f"{name}Trainer")(
        model=model, args=getattr(trl, f"{name}Config")(**{**given, **changes}),
        train_dataset=load_from_disk(f"{folder}/train"), eval_dataset=load_from_disk(f"{folder}/eval"),
        processing_class=tokenizer(), **others,
    )  # fmt: skip
    if size > 1 and not by:
        checkpoint = "auto" if name in GENERATES else "remat"
        for _ in range(2):
            dfa_hf.distribute_trainer(run, size=size, config=TrainingConfig(checkpoint=checkpoint))
    run.train()
    if server is not None:
        assert 1 < server.updates <= server.asked
        server.close()
    if getattr(run, "precompute_ref_logps", False):
        run.evaluate(load_from_disk(f"{folder}/more"))
    seen = [{k: v for k, v in entry.items() if not any(t in k for t in TIMES)} for entry in run.state.log_history]
    if name in ROLLOUTS:  # of all groups
        written += [list(run._logs[each]) for each in ("prompt", "completion")] + [run._logs["rewards"]["reward"]]
    return seen, parameters_of(run), written


VLLM = {"use_vllm": True, "vllm_mode": "server"}
MIXTURE = {"router_aux_loss_coef": 0.5}
BY_CONFIG = {"by": "config"}
"""Distributed by ParallelismConfig(cp_backend="dfa") in the arguments, without a call; "flags": by a launcher's."""
RUNS: dict[tuple[int, int, str], list[tuple[str, dict[str, Any]]]] = {
    (3, 3, "data"): [
        ("SFT", {**PACKED, **MIXTURE, **BY_CONFIG}),
        ("DPO", {"beta": 0.3, **MIXTURE, "use_weighting": True, **BY_CONFIG}),
        ("KTO", {"beta": 0.3, **BY_CONFIG}),
        ("Reward", {"center_rewards_coefficient": 0.1, **BY_CONFIG}),
    ],
    (3, 3, "answers"): [
        ("Distillation", {"beta": 0.3, **VLLM}),
        ("GRPO", {"beta": 0.1, "loss_type": "grpo", "num_iterations": 2, "max_steps": 3, "eval_strategy": "no"}),
        ("GRPO", {"loss_type": "dr_grpo", "mask_truncated_completions": True, **MIXTURE, "by": "flags"}),
        ("RLOO", {"beta": 0.1, **VLLM, "max_steps": 2, "eval_strategy": "no"}),
    ],
    (4, 2, "data"): [
        ("SFT", {**PACKED, "eval_strategy": "no"}),
        ("KTO", BY_CONFIG),
        ("Reward", {}),
        ("DPO", {"beta": 0.3, "loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.5], "ld_alpha": 0.4}),
        ("DPO", {"loss_type": ["sigmoid", "sft"], "precompute_ref_log_probs": True}),
    ],
    (4, 2, "answers"): [
        ("Distillation", {"beta": 1.0, "temperature": 0.7, "eval_strategy": "no"}),
        ("GRPO", {"beta": 0.1, "loss_type": "dapo", "num_generations": 4}),
        ("GRPO", {"beta": 0.1, **VLLM, "loss_type": "bnpo", "entropy_coef": 0.1, "top_entropy_quantile": 0.8}),
    ],
}


@pytest.mark.skipif(not INSTALLED, reason="TRL is not installed")
@pytest.mark.parametrize(("ranks", "size", "of"), RUNS)
def test_losses_gradients_and_what_is_logged_are_those_of_one_process_a_group(
    tmp_path: Path, ranks: int, size: int, of: str
) -> None:
    runs = [*by_turns(RUNS[ranks, size, of])]
    one, many = (str(tmp_path / folder) for folder in ("one", "many"))
    for folder in (one, many):
        for name in dict(runs):
            save(Path(folder) / name, name)
    wanted = run_ranks(ranks // size, train, one, 1, runs, timeout=120)
    for rank, found in enumerate(run_ranks(ranks, train, many, size, runs, timeout=170)):
        for (name, _), (logged, mine, written), want in zip(runs, found, wanted[rank // size], strict=True):
            assert LOGGED[name] <= want[0][0].keys()
            assert len(logged) == len(want[0])
            for entry, expected in zip(logged, want[0], strict=True):
                assert entry == pytest.approx(expected, rel=1e-4, abs=1e-6), name
            torch.testing.assert_close(mine, want[1], rtol=1e-4, atol=1e-6)
            assert written == want[2], name


def apart(rank: int, world_size: int) -> list[torch.Tensor]:
    model = dfa_hf.distribute_attention(build("Llama").eval())
    ids = text(2, 5, seed=rank)["input_ids"]
    drawn = share_rollouts._sampled(model, lambda: torch.full((2, 4 - rank), rank))
    return [drawn, share_rollouts._sampled(model, model.generate, ids, max_new_tokens=3, do_sample=True)]


def test_ranks_that_sample_other_tokens_take_those_of_the_first() -> None:
    found = run_ranks(3, apart)
    assert torch.equal(found[0][0], torch.zeros(2, 4))
    for drawn in found:
        assert all(map(torch.equal, drawn, found[0]))

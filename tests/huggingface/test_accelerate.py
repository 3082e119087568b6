"""A loop around accelerate, as the example does it, trains, resumes and evaluates as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.model_inputs import LEFT_OUT
from tests.huggingface.test_trainer import Sequences, prepare_worker
from tests.support.close import assert_close
from tests.support.models import build, gradients
from tests.support.workers import run_ranks

ACCUMULATE = 2
TOLERANCE = 1e-6
"""transformers computes its loss in float32, whatever the model's dtype."""


def tiny() -> Any:
    """A model whose layers have windows, which accelerate's own context parallelism would lose."""
    return build("Mistral", sliding_window=6).double()


def one_process(model: Any, samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The summed loss of all labelled tokens, over their number."""
    sums, count = [], 0
    for sample in samples:
        inputs = {name: sample[name][None] for name in ("input_ids", "position_ids")}
        scores = model(**inputs, use_cache=False).logits[0, :-1]
        sums.append(torch.nn.functional.cross_entropy(scores, sample["labels"][1:], reduction="sum"))
        count += int((sample["labels"][1:] != -100).sum())
    return torch.stack(sums).sum() / count


class Reference:
    """One process that sees the samples of every step of all groups."""

    def __init__(self, data: int) -> None:
        self.data, self.samples = data, Sequences(2 * ACCUMULATE * data + 1)
        self.model = tiny()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)
        self.losses: list[torch.Tensor] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def step(self) -> None:
        epoch, step = divmod(len(self.losses), 2)
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(epoch))
        each = ACCUMULATE * self.data
        loss = one_process(self.model, [self.samples[int(index)] for index in order[each * step : each * (step + 1)]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.losses.append(loss.detach())
        self.gradients.append(gradients(self.model))
        self.optimizer.step()
        self.optimizer.zero_grad()


def sharded(data: int, context: int) -> dict[str, Any]:
    """The arguments for FSDP2, which accelerate knows on GPUs only: it is told that it has some."""
    from accelerate import ParallelismConfig, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = "MULTI_GPU"
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["MistralDecoderLayer"]}
    return {
        "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, **wrap),
        "parallelism_config": ParallelismConfig(dp_shard_size=data, cp_size=context),
    }


class Loop:
    """The example's loop from its start, which keeps the losses and gradients of its steps."""

    def __init__(self, context: int, data: int, fsdp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        from accelerate.state import AcceleratorState

        from tests.huggingface import accelerate_loop as example

        AcceleratorState._reset_state(reset_partial_state=True)
        self.example, self.progress = example, example.Progress()
        self.accelerator = example.start(ACCUMULATE, **sharded(data, context) if fsdp else {})
        model = tiny()
        options = TrainingConfig(checkpoint="remat", loss_tile=7)
        size = None if fsdp or data == 1 else context
        assert dfa_hf.distribute_accelerator(self.accelerator, model, size=size, config=options) == context
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        loader = torch.utils.data.DataLoader(Sequences(2 * ACCUMULATE * data + 1), batch_size=1, shuffle=True)
        others = torch.utils.data.DataLoader(Sequences(5, seed=50), batch_size=1)
        self.prepared = self.accelerator.prepare(model, optimizer, loader, others)
        self.accelerator.register_for_checkpointing(self.progress)
        self.losses: list[torch.Tensor] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.prepared[1].optimizer.register_step_pre_hook(lambda *_: self.gradients.append(self.whole_gradients()))
        own = example.train_step
        monkeypatch.setattr(example, "train_step", lambda *args: self.losses.append(own(*args)) or self.losses[-1])

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        from torch.distributed.tensor import DTensor

        found = gradients(self.accelerator.unwrap_model(self.prepared[0]))
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}

    def train(self, until: int) -> None:
        model, optimizer, loader, _ = self.prepared
        self.gradients.clear()  # FSDP2 makes the optimizer's state by a step, when it is loaded
        self.example.train(self.accelerator, model, optimizer, loader, self.progress, until)

    def evaluate(self) -> torch.Tensor:
        found: torch.Tensor = self.example.evaluate(self.accelerator, self.prepared[0], self.prepared[3])
        return found


def compare(rank: int, world_size: int, context: int, folder: str) -> None:
    prepare_worker(rank, world_size)
    torch.set_default_dtype(torch.float64)
    data = world_size // context
    for fsdp in (False, True)[: 1 + (data > 1)]:
        reference, losses, found = Reference(data), [], []
        for until in (1, 3):  # a new start in the middle of the first epoch
            with pytest.MonkeyPatch.context() as monkeypatch:
                loop = Loop(context, data, fsdp, monkeypatch)
                if until > 1:
                    loop.accelerator.load_state(f"{folder}/{fsdp}")
                loop.train(until)
                losses += loop.losses
                found += loop.gradients
                if until == 1:
                    loop.accelerator.save_state(f"{folder}/{fsdp}")
        assert len(losses) == len(found) == 3
        for step in range(3):
            reference.step()
            assert_close(losses[step], reference.losses[step], tolerance=TOLERANCE, name=f"loss of step {step}")
            for name, wanted in reference.gradients[step].items():
                assert_close(found[step][name], wanted, tolerance=TOLERANCE, name=f"{name} of step {step}")
        with torch.no_grad():
            want = one_process(reference.model, [Sequences(5, seed=50)[index] for index in range(5)])
        assert_close(loop.evaluate(), want, tolerance=TOLERANCE, name="evaluation")
        batch = {name: value[None] for name, value in Sequences(1)[0].items()}
        with torch.no_grad():
            counted = [run.eval()(**batch, num_items_in_batch=7).loss for run in (loop.prepared[0], reference.model)]
        assert_close(*counted, tolerance=TOLERANCE, name="loss over a count given by hand")
        size = None if fsdp else context
        dfa_hf.distribute_accelerator(loop.accelerator, build("Llama").eval(), size=size)  # a teacher
        for training in (True, False):
            loop.prepared[0].train(training)
            assert len(loop.accelerator.gather_for_metrics(torch.ones(1))) == data
        if data > 1:
            with pytest.raises(UnsupportedError, match=r"size=4 (beside ParallelismConfig|for a second model)"):
                dfa_hf.distribute_accelerator(loop.accelerator, build("Llama"), size=4)
    if (parallel := loop.accelerator.parallelism_config) is not None:
        delattr(parallel, LEFT_OUT)  # as where accelerate alone has it
        beside = dfa_hf.distribute_attention(build("Llama"))
        with pytest.raises(UnsupportedError, match="distribute_attention beside ParallelismConfig"):
            beside(input_ids=torch.arange(4)[None])


@pytest.mark.parametrize(("ranks", "context"), [(4, 2), (3, 3)])
def test_accumulation_resume_and_evaluation_of_an_accelerate_loop_are_those_of_one_process(
    ranks: int, context: int, tmp_path: Path
) -> None:
    run_ranks(ranks, compare, context, str(tmp_path), timeout=120)

"""Train a language model by GRPO on its own rollouts: each shared prefix is computed once, on all ranks together.

    torchrun --nproc-per-node 2 examples/grpo_tree.py                            # a toy, on CPU ranks or one GPU each

A tiny model first learns to spell from Python's manual. Then it continues lines of it. The reward of an answer is the
number of its different pairs of a vowel beside a consonant, such as `ba` and `an`, over that of its pairs.
"""

import argparse
import os
import pydoc_data.topics
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import LlamaConfig, LlamaForCausalLM

from dfa_megatron import TrainingConfig, trees
from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.loss import scores_of

PROMPT, EPOCHS, CLIP = 32, 2, 0.2


@record  # torchrun ends with the text of an error
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--spelling-steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=4, help="in a step")
    parser.add_argument("--answers", type=int, default=8, help="for each prompt")
    parser.add_argument("--answer-length", type=int, default=24, help="bytes")
    parser.add_argument("--pack-length", type=int, default=1024, help="the most tokens of a pack")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    ranks = dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    text = torch.tensor([byte for byte in str(pydoc_data.topics.topics).replace("\\n", " ").encode() if byte < 128])
    tiny = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(tiny).to(device)
    dfa_hf.distribute_attention(model, config=TrainingConfig(loss_tile=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)

    def update() -> None:
        """Step with the mean of the ranks' gradients, as DDP and FSDP do."""
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def on_device(batch: dict) -> dict:
        return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}

    def reward(answer: torch.Tensor) -> float:
        letters = "".join(map(chr, answer.tolist())).lower()
        pairs = {pair for pair in pairwise(letters) if "".join(pair).isalpha() and sum(x in "aeiou" for x in pair) == 1}
        return len(pairs) / (len(letters) - 1)

    @torch.no_grad()
    def sampled(prompts: torch.Tensor) -> torch.Tensor:
        """Return prompts with answers; the first rank draws them for all."""
        with dfa_hf.local_attention(model):
            rollouts = model.generate(
                prompts.repeat_interleave(args.answers, 0), max_new_tokens=args.answer_length, do_sample=True, top_k=0,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        dist.broadcast(rollouts, src=0)
        return rollouts

    def log_probabilities(packs: list[trees.TreePack]) -> dict[int, torch.Tensor]:
        """Return those of the counted tokens of each rollout, the same on every rank."""
        found = {}
        for pack in packs:
            with scores_of(model) as scores:
                model(**on_device(pack.for_transformers()), use_cache=False)
            found |= pack.by_rollout(scores.logprobs[0])
        return found

    for _ in range(args.spelling_steps):
        rows = torch.stack([text[at : at + 128] for at in torch.randint(len(text) - 128, (16,))])
        model(**on_device({"input_ids": rows, "labels": rows}), use_cache=False).loss.backward()
        update()

    start = time.perf_counter()
    for step in range(args.steps):
        prompts = torch.stack([text[at : at + PROMPT] for at in torch.randint(len(text) - PROMPT, (args.prompts,))])
        rollouts = sampled(prompts.to(device)).cpu()
        rewards = torch.tensor([reward(own[PROMPT:]) for own in rollouts]).view(args.prompts, args.answers)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        masks = (torch.arange(rollouts.shape[1]) >= PROMPT).expand(rollouts.shape)
        packs = trees.from_rollouts(rollouts, masks, length=args.pack_length, multiple_of=ranks)
        old, losses = None, []
        for _ in range(EPOCHS):
            new = log_probabilities(packs)
            old = old or {number: own.detach() for number, own in new.items()}
            loss = torch.zeros((), device=device)
            for number, own in new.items():
                ratio = (own - old[number]).exp()[PROMPT:]
                near = ratio.clamp(1 - CLIP, 1 + CLIP)
                clipped = torch.minimum(ratio * advantages[number], near * advantages[number])
                loss = loss - clipped.mean() / len(new)
            loss.backward()  # computed alike on every rank, so that the mean of the ranks' gradients is right
            update()
            losses.append(loss.item())
        tokens = sum(pack.tree.length for pack in packs)
        if dist.get_rank() == 0:
            told = f"step {step:2d}  reward {rewards.mean():.3f}  loss {losses[-1]:.6f}"
            print(f"{told}  {tokens} of {rollouts.numel()} tokens")
    if dist.get_rank() == 0:
        print(f"{time.perf_counter() - start:.0f} s;", "".join(map(chr, rollouts[0][PROMPT:].tolist())))
    dist.destroy_process_group()


main()

"""Fine-tune a chat model with TRL's SFTTrainer: packed conversations, shared by all ranks of a group.

    torchrun --nproc-per-node 2 examples/trl_sft.py                              # a toy, on CPU ranks or one GPU each
    torchrun --nproc-per-node 8 examples/trl_sft.py --size 4 --model Qwen/Qwen3-8B --data chats.jsonl \\
        --seq-length 131072

Each line of `--data` is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
"""

import argparse
import pydoc_data.topics

import torch
import torch.distributed as dist
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.elastic.multiprocessing.errors import record
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from dfa_megatron import TrainingConfig
from dfa_megatron import huggingface as dfa_hf


@record  # torchrun ends with the text of an error
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="of the hub, or a folder; a tiny Llama if left out")
    parser.add_argument("--data", help="conversations, a JSON a line; questions about Python's manual if left out")
    parser.add_argument("--seq-length", type=int, default=512, help="tokens of a pack")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, help="ranks that share a pack; all of them if left out")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    if args.model:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    else:
        letters = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
        by_byte = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
        by_byte.pre_tokenizer, by_byte.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_byte, eos_token="<eos>", pad_token="<eos>")
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
        tiny = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=352, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=args.seq_length,
        )  # fmt: skip
        model = LlamaForCausalLM(tiny)
    if args.data:
        chats = load_dataset("json", data_files=args.data, split="train")
    else:
        manual = [(name, " ".join(text.split())[:300]) for name, text in pydoc_data.topics.topics.items()]
        turns = [(("user", f"What is {name}?"), ("assistant", text)) for name, text in manual]
        chats = Dataset.from_list(
            [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in turns]
        )
    settings = SFTConfig(
        output_dir="runs/trl",
        packing=True,  # conversations end to end, each attends to itself alone
        packing_strategy="bfd",
        max_length=args.seq_length,
        per_device_train_batch_size=1,
        gradient_checkpointing=False,  # layers are checkpointed below, with attention saved
        max_steps=args.steps,
        learning_rate=1e-5 if args.model else 1e-3,
        bf16=cuda,
        use_cpu=not cuda,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = SFTTrainer(model, settings, train_dataset=chats, processing_class=tokenizer)
    dfa_hf.distribute_trainer(trainer, size=args.size, config=TrainingConfig(checkpoint="remat"))
    trainer.train()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


main()

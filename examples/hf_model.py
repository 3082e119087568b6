"""Build the model and the text of the Hugging Face examples; distributed attention is not mentioned here."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gpt.text import Tokens, open_tokens

# PyTorch 2.13 says at every call that collectives which DeepSpeed and transformers use have new names.
warnings.filterwarnings("ignore", r"`?torch\.distributed\.\S+ is deprecated", FutureWarning)


class _Encoded:
    """Hold a text as tokens of the model's own tokenizer."""

    def __init__(self, path: str, tokenizer: Any) -> None:
        self.name, self.vocabulary = path, len(tokenizer)
        self._ids = torch.tensor(tokenizer(Path(path).read_text(encoding="utf-8"))["input_ids"])

    def __len__(self) -> int:
        return len(self._ids)

    def window(self, start: int, length: int) -> torch.Tensor:
        return self._ids[start : start + length]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags for model, data and length; launchers add --local_rank."""
    parser.add_argument("--model", help="name or path of a causal language model; a tiny new Llama if left out")
    parser.add_argument("--data", help="a text file; Python's language reference if left out")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--train-iters", type=int, default=40)
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser


def build(args: argparse.Namespace) -> tuple[Any, Tokens]:
    """Return the model and the tokens to train on."""
    torch.manual_seed(0)
    if args.model:
        if not args.data:
            raise SystemExit("--model needs --data, a text for its tokenizer")
        encoded = _Encoded(args.data, AutoTokenizer.from_pretrained(args.model))
        if len(encoded) <= args.seq_length:
            raise SystemExit(f"{args.data} has {len(encoded)} tokens, fewer than --seq-length {args.seq_length} needs")
        return AutoModelForCausalLM.from_pretrained(args.model), encoded
    tokens = open_tokens(args.data, vocab_size=None, seq_length=args.seq_length)
    config = LlamaConfig(
        vocab_size=tokens.vocabulary,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=args.seq_length,
    )
    return LlamaForCausalLM(config), tokens

"""The command: python -m tests.huggingface.sweep --help."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from dfa_megatron.huggingface.tried import TRIED
from tests.huggingface.sweep import images
from tests.huggingface.sweep.attempt import SWEPT, Verdict
from tests.huggingface.sweep.over_ranks import sweep
from tests.huggingface.sweep.tiny import built_as, layers_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep over the types that the arguments name; 1 if one of them is wrong or crashed."""
    import transformers

    parser = argparse.ArgumentParser(prog="python -m tests.huggingface.sweep", description=__doc__)
    parser.add_argument("types", nargs="*", help="of transformers' MODEL_FOR_CAUSAL_LM_MAPPING, and some with images")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--out",
        type=Path,
        help="write states as JSON (types that are not named stay); docs/models.json makes the table",
    )
    asked = parser.parse_args(arguments)
    every = {*transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *images.WHOLE}
    began, states, counts = time.monotonic(), {}, Counter[str]()
    for kind, verdicts in sweep(asked.types or sorted(every), asked.ranks):
        first = verdicts[0]
        if first.state in ("wrong", "crash") and built_as(kind) not in TRIED:  # and so it is refused
            reason = f"not on the list: {first.state}, {first.reason.strip().splitlines()[-1]}"
            verdicts = [first] = [Verdict(kind, "refused", "plain", reason)]
        counts[first.state] += 1
        said = " ".join(f"{v.section}: {v.state}{f' ({v.worst:.0e})' if v.worst else ''}" for v in verdicts)
        reasons = [v.reason.strip().splitlines()[-1] for v in verdicts if v.reason]
        print(f"{kind:26} {said}  {reasons[0] if reasons else ''}", flush=True)
        sections = {v.section: v.state for v in verdicts}
        built = built_as(kind)
        states[kind] = sections | ({"reason": reasons[0]} if reasons else {}) | ({"as": built} if built != kind else {})
        if first.state == "exact" and (layers := layers_of(kind)):
            states[kind]["layers"] = layers
    print(f"{dict(counts)} of {counts.total()} types in {time.monotonic() - began:.0f} s")
    if asked.out:
        if asked.types and asked.out.exists():
            states = json.loads(asked.out.read_text(encoding="utf-8"))["types"] | states
        about = {"transformers": transformers.__version__, "torch": torch.__version__, "ranks": asked.ranks}
        text = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(states[kind])}" for kind in sorted(states))
        head = json.dumps(about | {"sections": list(SWEPT)})
        asked.out.write_text(f'{head[:-1]},\n "types": {{\n{text}\n }}}}\n', encoding="utf-8")
    return 1 if counts["wrong"] + counts["crash"] else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

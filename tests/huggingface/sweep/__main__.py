"""The command: python -m tests.huggingface.sweep --help."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dfa_megatron.huggingface.check_model import TRIED
from tests.fuzz.frameworks import steps
from tests.fuzz.outcome import Outcome
from tests.huggingface.rows import of_type
from tests.huggingface.sweep import images
from tests.huggingface.sweep.tiny import NOT_RUN, built_as, layers_of

SECTIONS = ("plain", "packed", "remat")
STATES = {"right": "exact", "refused": "refused", "wrong": "wrong", "not run": "not run"}
"""By the kind of an outcome; any other is a crash."""
TYPES_OF_A_GROUP = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep over the types that the arguments name; 1 if one of them is wrong or crashed."""
    import transformers

    parser = argparse.ArgumentParser(prog="python -m tests.huggingface.sweep", description=__doc__)
    parser.add_argument("types", nargs="*", help="of transformers' MODEL_FOR_CAUSAL_LM_MAPPING, and some with images")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--out",
        type=Path,
        help="write states as JSON (types that are not named stay); dfa_megatron/huggingface/models.json is the list",
    )
    asked = parser.parse_args(arguments)
    every = {*transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *images.WHOLE}
    began, states, counts = time.monotonic(), {}, Counter[str]()
    for kind, outcomes in sweep(asked.types or sorted(every), asked.ranks):
        states[kind], worst = state_of(kind, outcomes)
        counts[states[kind]["plain"]] += 1
        print(f"{kind:26} {worst:.0e} {states[kind]}", flush=True)
    print(f"{dict(counts)} of {counts.total()} types in {time.monotonic() - began:.0f} s")
    if asked.out:
        if asked.types and asked.out.exists():
            states = json.loads(asked.out.read_text(encoding="utf-8"))["types"] | states
        about = {"transformers": transformers.__version__, "torch": torch.__version__, "ranks": asked.ranks}
        text = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(states[kind])}" for kind in sorted(states))
        head = json.dumps(about | {"sections": list(SECTIONS)})
        asked.out.write_text(f'{head[:-1]},\n "types": {{\n{text}\n }}}}\n', encoding="utf-8")
    return 1 if counts["wrong"] + counts["crash"] else 0


def sweep(kinds: Sequence[str], ranks: int) -> Iterator[tuple[str, dict[str, Outcome]]]:
    """Yield each type with the outcome of each section."""
    yield from ((kind, {"plain": Outcome(0, "not run", NOT_RUN[kind])}) for kind in kinds if kind in NOT_RUN)
    left = [kind for kind in kinds if kind not in NOT_RUN]
    for at in range(0, len(left), TYPES_OF_A_GROUP):
        some = left[at : at + TYPES_OF_A_GROUP]
        draws = [of_type(kind, section, ranks, unlisted=True) for kind in some for section in SECTIONS]
        found = {draw.name: outcome for draw, outcome in steps.run("transformers", draws, 60.0, math.inf)}
        outcomes = iter([found[draw.name] for draw in draws])
        yield from ((kind, {section: next(outcomes) for section in SECTIONS}) for kind in some)


def state_of(kind: str, outcomes: dict[str, Outcome]) -> tuple[dict[str, Any], float]:
    """Return what the table says of a type, and the largest difference as a share of the limit."""
    sections = {section: STATES.get(outcome.kind, "crash") for section, outcome in outcomes.items()}
    reasons = [outcome.reason.strip().splitlines()[-1] for outcome in outcomes.values() if outcome.reason]
    built, first = built_as(kind), sections["plain"]
    if first in ("wrong", "crash") and built not in TRIED:  # and so it is refused
        first, reasons = "refused", [f"not on the list: {first}, {reasons[0]}"]
    found: dict[str, Any] = sections if first == "exact" else {"plain": first}
    found |= {"reason": reasons[0]} if reasons else {}
    found |= {"as": built} if built != kind else {}
    if first == "exact" and (layers := layers_of(kind)):
        found["layers"] = layers
    return found, max(outcome.worst for outcome in outcomes.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())

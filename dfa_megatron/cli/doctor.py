"""`dfa-megatron doctor`: list this machine, check and time each kernel, and run one distributed call."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.runtime.environment import TESTED, span

if TYPE_CHECKING:
    from dfa_megatron.doctor.kernel_trial import Trial, Verdict


@dataclass(frozen=True)
class DoctorFlags:
    """The flags of the command."""

    device: str = flag("auto", "the kernels' device", choices=("auto", "cuda", "cpu"))
    kernel: tuple[str, ...] = flag((), "only these (default: all)")
    seq_length: int | None = flag(None, "tokens of the attention that is timed (default: 32768, on CPU 256)")
    heads: int | None = flag(None, "query heads (default: 32, on CPU 4)")
    kv_heads: int | None = flag(None, "key and value heads (default: as many as query heads)")
    head_dim: int = flag(128, "of a head")
    mask: str = flag("causal", "of the kernels' rates", choices=("causal", "full"))
    dtype: str | None = flag(
        None, "default: bfloat16, on CPU float32", choices=("bfloat16", "float16", "float32", "float64")
    )
    repetitions: int = flag(7, "timed calls; the median counts")
    call: bool = flag(True, "also run one distributed call on all GPUs, or on two CPU ranks")
    quick: bool = flag(False, "the kernel that `auto` takes alone, and causal attention alone")
    json: bool = flag(False, "print JSON in place of tables")


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="check this machine: versions, devices, links, every kernel against float64, one distributed call",
        description=__doc__,
        epilog="The last line is the verdict. Exit status: 0 if ready, 1 if no kernel serves the shape, or a "
        "kernel or the distributed call is wrong or fails.",
    )
    add_flags(parser, DoctorFlags)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve the parsed arguments; return the exit status."""
    flags = from_flags(DoctorFlags, args)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read when the package is imported
    shape = shape_of(flags)
    from dfa_megatron import kernels
    from dfa_megatron.doctor.distributed_call import CASES, StartedRanks
    from dfa_megatron.doctor.kernel_trial import FORMS, automatic, compile_ahead, examine
    from dfa_megatron.doctor.machine import devices, p2p_access, versions
    from dfa_megatron.doctor.start_ranks import ranks_here

    for name in flags.kernel:
        kernels.get(name)  # refused before ranks are started
    some = 1 if flags.quick else None  # causal stands first
    forms, cases = [*FORMS][:some], CASES[:some]
    calls = StartedRanks(shape, ranks_here(None, shape.device), cases) if flags.call else None
    machine = {"versions": versions(), "tested": TESTED, "devices": devices(), "p2p_access": p2p_access()}
    if not flags.json:
        print(_machine(machine))
    auto = automatic(shape)
    names = flags.kernel or ((auto,) if flags.quick and auto else ())
    compile_ahead(shape, names, forms)
    verdicts = examine(shape, names, flags.repetitions, forms, calls.wait if calls else bool)
    if not flags.json:
        print(_kernels(shape, flags.mask, verdicts, auto), flush=True)
    call = calls.result() if calls else {}
    ready, said = _verdict(shape, verdicts, auto, call)
    if flags.json:
        sizes = {name: getattr(shape, name) for name in ("q_len", "heads", "kv_heads", "head_dim", "device")}
        sizes |= {"mask": flags.mask, "dtype": str(shape.dtype)}
        rows = [verdict.as_json() for verdict in verdicts]
        found = {"shape": sizes, "kernels": rows, "auto": auto, "call": call, "ready": ready, "verdict": said}
        print(json.dumps(machine | found, indent=1))
    else:
        print(*([_of_call(call)] if call else []), said, sep="\n")
    return int(not ready)


def shape_of(flags: DoctorFlags) -> Trial:
    """Return the attention that the flags describe.

    Raises:
        UnsupportedError: a count is not positive, kv_heads does not divide heads, or there is no such device.
    """
    import torch

    from dfa_megatron.doctor.kernel_trial import Trial
    from dfa_megatron.doctor.start_ranks import device_of
    from dfa_megatron.errors import UnsupportedError
    from dfa_megatron.plan.language.geometry import FULL

    device = device_of(flags.device)
    on_cpu = device == "cpu"
    length = (256 if on_cpu else 32768) if flags.seq_length is None else flags.seq_length
    heads = (4 if on_cpu else 32) if flags.heads is None else flags.heads
    kv_heads = heads if flags.kv_heads is None else flags.kv_heads
    if min(length, heads, kv_heads, flags.head_dim, flags.repetitions) < 1:
        raise UnsupportedError("a count below 1", "it must be positive", "1 or more")
    if heads % kv_heads:
        raise UnsupportedError(
            f"{heads} heads on {kv_heads}", "heads must be a multiple of kv_heads", "a divisor of the heads"
        )
    dtype = getattr(torch, flags.dtype or ("float32" if on_cpu else "bfloat16"))
    shape = Trial.square(length, heads, kv_heads, flags.head_dim, dtype, device)
    return shape if flags.mask == "causal" else replace(shape, band=FULL)


def _verdict(shape: Trial, verdicts: list[Verdict], auto: str | None, call: dict[str, Any]) -> tuple[bool, str]:
    """Return whether the machine is ready, and one line that says for what, or what is missing."""
    missing = [f"kernel {verdict.name} is wrong" for verdict in verdicts if verdict.wrong]
    missing += [f"no kernel serves {shape.dtype} with head_dim {shape.head_dim}"] * (auto is None)
    missing += ["the distributed call failed"] * ("failed" in call)
    missing += ["the distributed call is wrong"] * bool(call.get("wrong"))
    if missing:
        return False, f"not ready: {', '.join(missing)}"
    ranks, on_cpu = call.get("ranks", 1), shape.device == "cpu"
    alone = ranks == 1
    words = [f"kernel {auto}" if alone else f"kernel {call['kernel']} over {call['transport']}"]
    words += ["on CPU ranks, for tests and small models" if on_cpu else "on one GPU" if alone else f"on {ranks} GPUs"]
    words += ["no call between ranks was tried"] * alone
    words += [f"not {v.name}: {v.refused}" for v in verdicts if v.name == "flash4" and v.refused and not on_cpu]
    return True, f"ready: {', '.join(words)}"


def _of_call(call: dict[str, Any]) -> str:
    where = f"one distributed call over {call['ranks']} ranks"
    if "failed" in call:
        return f"{where} FAILED: {call['failed']}"
    cases, how = list(call["errors"].values()), f"schedule {call['schedule']}, kernel {call['kernel']}"
    largest = ", ".join(f"{name} {max(case[name] for case in cases):.0e}" for name in cases[0])
    lines = [
        f"{where}: {how}, {1e3 * call['seconds']:.3g} ms with its backward",
        f"  largest errors against float64 of {', '.join(call['errors'])}: {largest}",
    ]
    lines += [f"  {case} refused: {why}" for case, why in call["refused"].items()]
    lines += [f"  link {name}: {rate / 1e9:.3g} GB/s each way" for name, rate in call["bytes_per_second"].items()]
    return "\n".join(lines + [f"  WRONG: {', '.join(call['wrong'])}"] * bool(call["wrong"]))


def _machine(machine: dict[str, Any]) -> str:
    tested = {name: f" (tested: {span(name)})" for name in TESTED}
    found = ", ".join(f"{name} {version}{tested.get(name, '')}" for name, version in machine["versions"].items())
    lines = ["versions", *textwrap.wrap(found, 110, initial_indent="  ", subsequent_indent="  "), "devices"]
    for gpu in machine["devices"]:
        where = f"{gpu['gib']} GiB, {gpu['multiprocessors']} multiprocessors"
        lines.append(f"  cuda:{gpu['index']}  {gpu['name']}, compute capability {gpu['capability']}, {where}")
    if not machine["devices"]:
        lines.append("  no CUDA device")
    if len(machine["p2p_access"]) > 1:
        lines.append("links (+ direct access to the other's memory, - through the host)")
        for index, row in enumerate(machine["p2p_access"]):
            lines.append(f"  cuda:{index}  " + " ".join("+-"[not reached] for reached in row))
    return "\n".join(lines)


def _kernels(shape: Trial, mask: str, verdicts: list[Verdict], auto: str | None) -> str:
    dtype = str(shape.dtype).removeprefix("torch.")
    heads = f"{shape.heads} heads on {shape.kv_heads} of {shape.head_dim}"
    lines = [
        f"kernels: {dtype} on {shape.device}, {heads}; rates: {mask}, {shape.q_len} tokens",
        f"  {'':<10}{'largest error against float64 of':<42}{'TFLOP/s':>16}",
        f"  {'':<10}" + "".join(f"{name:>8}" for name in ("out", "lse", "dq", "dk", "dv")) + "   forward / backward",
    ]
    for verdict in verdicts:
        lines += _lines(verdict)
    lines.append(f"kernel='auto' takes {auto}" if auto else "kernel='auto' finds none: every kernel refuses")
    if bad := [verdict.name for verdict in verdicts if verdict.wrong]:
        lines.append(f"WRONG: {', '.join(bad)}")
    return "\n".join(lines)


def _lines(verdict: Verdict) -> list[str]:
    if verdict.refused is not None:
        return [f"  {verdict.name:<10}refused: {verdict.refused}"]
    found = list(verdict.errors.values())
    worst = (max(form[name] for form in found) for name in (found[0] if found else ()))
    line = f"  {verdict.name:<10}" + "".join(f"{error:>8.0e}" for error in worst)
    if verdict.tflops:
        forward, backward = (f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}" for rate in verdict.tflops.values())
        line += f"   {forward:>7} / {backward}"
    lines = [line + (f"   not timed: {verdict.untimed}" if verdict.untimed else "")]
    lines += [f"  {'':<10}  without {verdict.without}"] if verdict.without else []
    return lines + [f"  {'':<10}  WRONG: {what}" for what in verdict.wrong]

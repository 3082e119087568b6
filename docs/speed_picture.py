"""Draw TFLOP/s by length, of ours and others: `python -m docs.speed_picture`, which needs matplotlib."""

from __future__ import annotations

from docs.attention_tables import ALL, DEEPSPEED, OURS, PYTORCH, SOME, TE_OTHERS, TE_RING, ULYSSES, Methods, tflops
from docs.scale_tables import save

METHODS: dict[str, Methods] = {
    "ours": OURS,
    "Ulysses, the same kernel": ULYSSES,
    "DeepSpeed's Ulysses, the same kernel": DEEPSPEED,
    "Transformer Engine, the best of four": TE_RING + TE_OTHERS,
    "PyTorch context_parallel": PYTORCH,
    "ring-flash-attn, the best of three": ("ring-flash-attn ring", "ring-flash-attn zigzag", "ring-flash-attn llama3"),
}


def main() -> None:
    """Write the picture of two GPUs."""
    from matplotlib import pyplot

    pyplot.rcParams |= {"font.size": 11, "svg.hashsalt": "dfa_megatron", "axes.grid": True, "grid.alpha": 0.3}
    name, lengths = "11-22-2xh200-peers-flash4", (8, 32, 64, 128)
    figure, axes = pyplot.subplots(1, 2, figsize=(8.4, 4.4), sharey=True, layout="constrained")
    for axis, heads in zip(axes, (ALL, SOME), strict=True):
        for label, methods in METHODS.items():
            rates = [tflops(methods, (name, heads, length)) for length in lengths]
            axis.plot(lengths, rates, "o-", label=label, linewidth=2.5 if label == "ours" else 1.2)
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{length}K" for length in lengths])
        axis.set(title=f"{heads[0]} query heads on {heads[1]}", xlabel="tokens of the sequence", ylim=(0, None))
    axes[0].set_ylabel("TFLOP/s of a GPU, 2 H200")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, "tflops_2xh200.svg")


if __name__ == "__main__":
    main()

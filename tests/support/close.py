"""Compare tensors so that NaN never passes."""

from __future__ import annotations

import torch


def assert_close(got: torch.Tensor, want: torch.Tensor, *, tolerance: float, name: str = "tensor") -> None:
    """Assert that |got - want| / |want| (Frobenius norms, in float64) is at most `tolerance`.

    Infinities must be in the same places and are left out of the norms; where |want| is 0, |got| itself is compared.
    NaN on either side never passes.

    Raises:
        AssertionError: with the distance and the element that is farthest off.
    """
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}")
    a, b = got.detach().double().cpu(), want.detach().double().cpu()
    for side, values in (("", a), ("the wanted ", b)):
        if values.isnan().any():
            raise AssertionError(f"{name}: {side}value at {_place(values.isnan())} is NaN")
    different = (a != b) & (a.isinf() | b.isinf())
    if different.any():
        place = _place(different)
        raise AssertionError(f"{name}: {a[place].item()} at {place}, wanted {b[place].item()}")
    finite = b.isfinite()
    error = torch.where(finite, a - b, 0.0)
    norm = torch.where(finite, b, 0.0).norm().item()
    distance = error.norm().item() / (norm or 1.0)
    if not distance <= tolerance:
        place = _place(error.abs() == error.abs().max())
        raise AssertionError(
            f"{name}: relative distance {distance:.3e} is above {tolerance:.1e}; farthest off at {place}: "
            f"{a[place].item():.9g}, wanted {b[place].item():.9g}"
        )


def _place(mask: torch.Tensor) -> tuple[int, ...]:
    """Return the first index at which the mask is true."""
    return tuple(int(index) for index in mask.nonzero()[0])

"""The rank processes import tests.faults by name."""

from __future__ import annotations

"""Find the version of Megatron-Core, and warn if this package was not tested with it."""

from __future__ import annotations

import functools
import logging
import os
import re

logger = logging.getLogger("dfa_megatron.megatron")

LATEST_TRIED = (0, 19)
"""Major and minor of the newest Megatron-Core that the tests run on."""


def version() -> str:
    """Return Megatron-Core's own version text: 0.19.2, or 0.20.0rc0+1234abc in a clone."""
    import megatron.core

    return str(getattr(megatron.core, "__version__", "of unknown version"))


@functools.cache
def say_if_not_tried() -> None:
    """Log one warning per run if Megatron-Core is newer than every tested version."""
    found = re.match(r"(\d+)\.(\d+)", version())
    if found and (int(found[1]), int(found[2])) > LATEST_TRIED and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "dfa: Megatron-Core %s was not tried: 0.16 to %d.%d are. Only the names that have to be replaced are "
            "checked: compare the first losses with those of Megatron's own attention",
            version(),
            *LATEST_TRIED,
        )

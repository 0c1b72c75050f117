"""Random streams: every unit of work has one, derived from the seed and the unit's name.

Results therefore do not depend on the number of workers or on the order in which they finish.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def derive(seed: int, *names: object) -> int:
    """A 63-bit seed that depends on ``seed`` and the unit's name, and on nothing else.

    Examples:
        >>> derive(0, "layer1", 3) == derive(0, "layer1", 3) != derive(0, "layer1", 4)
        True
    """
    text = "\x1f".join([str(int(seed)), *(f"{type(n).__name__}:{n}" for n in names)])
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, *names: object) -> np.random.Generator:
    """The random stream of one unit of work.

    Examples:
        >>> float(stream(0, "a").random()) == float(stream(0, "a").random())
        True
    """
    import numpy as np

    return np.random.default_rng(derive(seed, *names))

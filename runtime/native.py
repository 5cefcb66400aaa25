"""What is compiled of FDG: the functions of _native.c, or None where no C compiler was there when FDG was installed.

They give the same bits as the Python beside them, in less time. Free of torch.
"""

from __future__ import annotations

from typing import Any

native: Any
try:
    from fdg.runtime import _native as native  # type: ignore[attr-defined, no-redef]
except ImportError:
    native = None

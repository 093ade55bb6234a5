"""torch, for what runs where it need not be: a scheduler, a command that only asks for help, a caller who has no tensor."""

from __future__ import annotations

import sys
from typing import Any


def torch_if_imported() -> Any:
    """torch, if this process has imported it, or None. Where another thread is just at it, until that has ended."""
    if "torch" not in sys.modules:
        return None
    import torch  # as `sys.modules` has it, it may have only half of its names yet

    return torch

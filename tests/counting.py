"""How many inputs were tried, which the end of a run says (`conftest`)."""

from __future__ import annotations

from collections import Counter

tried: Counter[str] = Counter()

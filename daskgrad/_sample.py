"""A few rows of whatever the data is, as pandas has them: for looking, not for results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from . import _dask


def few_rows(data: Any, rows: int) -> tuple[pd.DataFrame | pd.Series | list[Any], str]:
    """About `rows` rows spread over `data`, and a sentence that says what was computed for it.

    Of a Dask frame they come from the first, the middle and the last partition; of a Bag, as records, from its beginning.
    """
    kind = _dask.kind(data)
    if kind is None:
        places = np.unique(np.linspace(0, max(len(data) - 1, 0), min(rows, len(data))).round().astype(int))
        return data.iloc[places], f"{len(places):,} of {len(data):,} rows were looked at"
    if kind == "bag":
        literal = _dask.peek(data)
        records = literal[:rows] if literal is not None else list(data.take(rows, npartitions=-1, warn=False))
        return records, f"the first {len(records)} records were computed"
    parts = sorted({0, data.npartitions // 2, data.npartitions - 1})
    share = -(-rows // len(parts))
    heads = [data.partitions[part].head(share, npartitions=1) for part in parts]
    found = pd.concat([head for head in heads if len(head)] or heads[:1])
    which = f"partition{'' if len(parts) == 1 else 's'} {', '.join(map(str, parts))}"
    return found, f"the first rows of {which} were computed, {len(found)} in all"

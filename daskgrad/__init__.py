"""Write a PyTorch function of one row; get its derivatives as columns of your dataframe, at any size."""

import typing as _typing

from ._checkpoints import checkpoints as checkpoints
from ._cluster import local_client as local_client
from ._column import derivatives as derivatives
from ._column import grad_column as grad_column
from ._derivative import aux as aux
from ._derivative import dot as dot
from ._derivative import norm as norm
from ._derivative import problem as problem
from ._derivative import project as project
from ._errors import DaskgradError as DaskgradError
from ._errors import EngineWarning as EngineWarning
from ._errors import GraphError as GraphError
from ._errors import PlanError as PlanError
from ._errors import RowError as RowError
from ._errors import StoreError as StoreError
from ._explain import explain as explain
from ._gradcheck import gradcheck as gradcheck
from ._store import Verified as Verified
from ._store import Written as Written
from ._store import to_parquet as to_parquet
from ._store import verify as verify
from ._totals import clipped_sum as clipped_sum
from ._totals import fisher_diagonal as fisher_diagonal
from ._totals import mean_gradient as mean_gradient
from ._totals import parameter_slices as parameter_slices
from ._watch._monitor import Monitor as Monitor
from ._watch._monitor import monitor as monitor
from ._watch._progress import progress as progress

__version__ = "0.1.0"

if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from ._names import nearest

        public = [known for known in globals() if not known.startswith("_")]
        sums = ""
        if name in ("sum", "mean", "total", "average"):
            sums = (
                " Over rows: a column's own .sum() and .mean(); of gradients by a model's parameters dg.mean_gradient(data, fn, 'model', "
                "shared={'model': model})."
            )
        raise AttributeError(f"module 'daskgrad' has no attribute {name!r}.{nearest(name, public)}{sums}", name=name)

"""What a column's dtype says alone, before its cells are seen: what it can be, and what a gradient by it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
from pandas.api.extensions import ExtensionDtype

DType: TypeAlias = np.dtype[Any] | ExtensionDtype

_KINDS = {"f": "real", "i": "integer", "u": "integer", "b": "bool", "c": "complex", "O": "object"}
_PLAIN = {"f": np.dtype("f8"), "i": np.dtype("i8"), "u": np.dtype("u8"), "b": np.dtype("?"), "c": np.dtype("c16")}


def role(dtype: DType) -> str:
    """What a column of this dtype can be for a row function.

    Returns:
        "real", "integer", "bool", "complex": one number a cell · "array": an array a cell ·
        "object": only the data can tell · "static": the row function gets the plain Python value ·
        "unsupported": there is no way to torch, and `refusal` says why.
    """
    if isinstance(dtype, pd.ArrowDtype):
        return _arrow_role(dtype.pyarrow_dtype)
    if isinstance(dtype, np.dtype):
        return "unsupported" if too_wide(dtype) else _KINDS.get(dtype.kind, "static")
    if dtype.kind not in _PLAIN:
        return "static"
    return "unsupported" if too_wide(numpy_dtype(dtype)) else _KINDS[dtype.kind]


def gradient_dtype(dtype: DType) -> DType:
    """The dtype of a gradient by a column of `dtype`.

    Raises:
        TypeError: a column of this dtype cannot be differentiated; the message is `refusal`.
    """
    if (reason := refusal(dtype)) is not None:
        raise TypeError(reason)
    if isinstance(dtype, pd.ArrowDtype):
        return pd.ArrowDtype(_arrow_gradient(dtype.pyarrow_dtype))
    if isinstance(dtype, np.dtype):
        return np.dtype("f8") if dtype.kind in "iu" else dtype.newbyteorder("=")  # a pickle makes it native anyway
    if not hasattr(dtype, "numpy_dtype"):  # Sparse and its like: a gradient is dense
        dense = numpy_dtype(dtype)
        return np.dtype("f8") if dense.kind in "iu" else dense
    return pd.Float64Dtype() if dtype.kind in "iu" else dtype


def refusal(dtype: DType) -> str | None:
    """Why a column of `dtype` cannot be differentiated, as "it holds ..."; None if it can.

    object is None: there only the data can tell.
    """
    kind = role(dtype)
    if kind == "unsupported":
        return unsupported(dtype)
    if kind == "bool":
        return "it holds bool"
    if kind == "array" and isinstance(dtype, pd.ArrowDtype) and pa.types.is_boolean(_leaf_type(dtype.pyarrow_dtype)):
        return "it holds arrays of bool"
    return f"it holds {_static_words(dtype)}" if kind == "static" else None


def floating(dtype: DType) -> np.dtype[Any] | None:
    """The floating dtype that a column brings into the computation; None for integers, bool, static and object."""
    if role(dtype) not in ("real", "complex", "array"):
        return None
    if isinstance(dtype, pd.ArrowDtype):
        leaf = _leaf_type(dtype.pyarrow_dtype)
        return np.dtype("f8") if pa.types.is_decimal(leaf) else _floating_part(np.dtype(leaf.to_pandas_dtype()))
    return _floating_part(numpy_dtype(dtype))


def common_dtype(dtypes: Iterable[DType], *, value: bool) -> DType:
    """The dtype of a number per row that comes from columns with the gradient dtypes `dtypes`.

    `value`: of the row function's value, always a real number. Otherwise of a derivative by all of them, which is an
    array where one of them is: object. Flavours mix as in pandas' arithmetic: Arrow, then nullable, then NumPy.
    """
    found = list(dtypes)
    if not value and any(role(dtype) in ("array", "object") for dtype in found):
        return np.dtype(object)
    if len(set(found)) == 1 and role(found[0]) == "real":
        return found[0]
    # an object cell may hold anything up to a float64
    widths = [floating(dtype) or np.dtype("f8") for dtype in found] or [np.dtype("f8")]
    width = np.result_type(*widths)
    if any(isinstance(dtype, pd.ArrowDtype) for dtype in found):
        return pd.ArrowDtype(pa.from_numpy_dtype(width))
    if any(isinstance(dtype, (pd.Float32Dtype, pd.Float64Dtype)) for dtype in found):
        return pd.Float64Dtype() if width == np.dtype("f8") else pd.Float32Dtype()
    return width


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is a list whose cells lie one after another (a list view's need not)."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_tensor(kind: Any) -> bool:
    """Whether an Arrow type is the fixed-shape tensor extension."""
    return isinstance(kind, pa.FixedShapeTensorType)


def _arrow_role(kind: Any) -> str:
    types = pa.types
    if types.is_floating(kind) or types.is_decimal(kind):
        return "real"
    if types.is_integer(kind):
        return "integer"
    if types.is_boolean(kind):
        return "bool"
    leaf = _leaf_type(kind)
    if leaf is kind or _arrow_role(leaf) not in ("real", "integer", "bool"):
        return "static"
    return "unsupported" if _has_view(kind) or _permuted(kind) else "array"


def _leaf_type(kind: Any) -> Any:
    """The item type of a tensor type or of the innermost list; the type itself if it is neither."""
    if is_tensor(kind):
        return kind.value_type
    while is_list(kind) or _is_view(kind):
        kind = kind.value_type
    return kind


def _is_view(kind: Any) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _has_view(kind: Any) -> bool:
    return _is_view(kind) or (is_list(kind) and _has_view(kind.value_type))


def _permuted(kind: Any) -> bool:
    return is_tensor(kind) and kind.permutation is not None and list(kind.permutation) != sorted(kind.permutation)


def _arrow_gradient(kind: Any) -> Any:
    """The same type around floating items."""
    if is_tensor(kind):
        return pa.fixed_shape_tensor(_arrow_gradient(kind.value_type), kind.shape, kind.dim_names, kind.permutation)
    if not is_list(kind):
        return kind if pa.types.is_floating(kind) else pa.float64()
    item = kind.value_field.with_type(_arrow_gradient(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The dense NumPy dtype of a column with one number a cell (not Arrow)."""
    if isinstance(dtype, np.dtype):
        return dtype
    inner = dtype.subtype if isinstance(dtype, pd.SparseDtype) else getattr(dtype, "numpy_dtype", None)
    return inner if isinstance(inner, np.dtype) else _PLAIN[dtype.kind]


def too_wide(dtype: np.dtype[Any]) -> bool:
    return (dtype.kind == "f" and dtype.itemsize > 8) or (dtype.kind == "c" and dtype.itemsize > 16)


def _floating_part(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    if dtype.kind == "c":
        return np.dtype(f"f{dtype.itemsize // 2}")
    return dtype.newbyteorder("=") if dtype.kind == "f" else None


def unsupported(dtype: DType) -> str:
    if not isinstance(dtype, pd.ArrowDtype):
        plain = numpy_dtype(dtype)
        narrow = "complex128" if plain.kind == "c" else "float64"
        return f"it holds {plain.name}, which is wider than any number of torch: astype({narrow!r}) first"
    if is_tensor(dtype.pyarrow_dtype):
        return "it holds tensors with permuted axes, on which readers of Arrow do not agree: store them row-major"
    return f"it holds {dtype.pyarrow_dtype}, whose cells need not lie in order: make it a list column first"


def _static_words(dtype: DType) -> str:
    if isinstance(dtype, pd.ArrowDtype):
        return _arrow_words(dtype.pyarrow_dtype)
    if isinstance(dtype, pd.StringDtype) or dtype.kind in "US":
        return "text"
    if isinstance(dtype, pd.CategoricalDtype):
        return "categories"
    if isinstance(dtype, pd.PeriodDtype):
        return "periods"
    if isinstance(dtype, pd.IntervalDtype):
        return "intervals"
    return {"M": "datetimes", "m": "durations"}.get(dtype.kind, f"{dtype} values")


def _arrow_words(kind: Any) -> str:
    types = pa.types
    tests: tuple[tuple[Callable[[Any], bool], str], ...] = (
        (types.is_string, "text"),
        (types.is_large_string, "text"),
        (types.is_string_view, "text"),
        (types.is_dictionary, "categories"),
        (types.is_timestamp, "datetimes"),
        (types.is_date, "dates"),
        (types.is_time, "times of day"),
        (types.is_duration, "durations"),
        (types.is_binary, "bytes"),
        (types.is_large_binary, "bytes"),
        (types.is_fixed_size_binary, "bytes"),
        (types.is_struct, "records"),
        (types.is_null, "nothing but missing values"),
    )
    if _leaf_type(kind) is not kind:
        return f"lists of {_arrow_words(_leaf_type(kind))}"
    return next((words for test, words in tests if test(kind)), f"{kind} values")

"""A column of Arrow as flat arrays: without dictionaries, dates and structs, its missing values filled or found."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshfit.errors import DataError


@dataclass(frozen=True)
class Fill:
    """What stands for a missing value: ``fill=0`` in every column, ``fill={"age": 0.0}`` in these. None: nothing."""

    asked: Any = None

    def covers(self, column: str) -> bool:
        """Whether a missing value of ``column``, or of a field of it, has one that stands for it."""
        if not isinstance(self.asked, Mapping):
            return self.asked is not None
        return any(name == column or name.startswith(f"{column}.") for name in self.asked)

    def __getitem__(self, column: str) -> Any:
        return self.asked.get(column) if isinstance(self.asked, Mapping) else self.asked

    def __call__(self, array: Any, column: str, file: str) -> Any:
        """``array`` with its missing values filled, where there is something to fill them with."""
        import pyarrow as pa

        value = self[column]
        if value is None or not array.null_count:
            return array
        try:
            if pa.types.is_null(array.type):
                return pa.array([value] * len(array))
            if pa.types.is_integer(array.type) and isinstance(value, float):
                array = array.cast(pa.float64())
            both = pa.concat_arrays([array, pa.array([value], array.type)])
            at = np.where(array.is_null().to_numpy(zero_copy_only=False), len(array), np.arange(len(array)))
            return both.take(pa.array(at))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"fill={value!r} does not fit column {column!r} of {file}, which is {array.type}",
                str(error).split("\n")[0][:200],
                f"give each column its own: fill={{{column!r}: ...}}",
            ) from error


def root_of(name: str, known: Any) -> str | None:
    """The column that holds ``name``: itself, or "a" of "a.b"; None where there is none."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def chosen(batch: Any, name: str) -> Any:
    """The column ``name`` of a record batch, or the field "a.b" of the struct "a"; None where there is none."""
    import pyarrow as pa
    from pyarrow import compute

    root = root_of(name, batch.schema.names)
    if root is None:
        return None
    array = batch.column(root)
    for field in name[len(root) + 1 :].split(".") if name != root else ():
        if not pa.types.is_struct(array.type) or array.type.get_field_index(field) < 0:
            return None
        array = compute.call_function(
            "struct_field", [array], compute.StructFieldOptions([field])
        )  # missing where the struct is
    return array


def fields_of(schema: Any) -> list[str]:
    """The fields of a schema's structs: "a.b"."""
    import pyarrow as pa

    found = []
    for each in schema:
        if pa.types.is_struct(each.type):
            inner = pa.schema(list(each.type))
            found += [f"{each.name}.{name}" for name in [*inner.names, *fields_of(inner)]]
    return found


def missing_rows(array: Any) -> NDArray[np.bool_] | None:
    """Which rows have no value, or a list in which one is missing; None: all have."""
    import pyarrow as pa
    from pyarrow import compute

    found = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        inner = array.flatten()
        if inner.null_count:
            found = np.zeros(len(array), bool) if found is None else found
            parents = compute.call_function("list_parent_indices", [array]).to_numpy(zero_copy_only=False)
            found[parents[inner.is_null().to_numpy(zero_copy_only=False)]] = True
    return found


@contextmanager
def named(column: str, kind: Any, file: str) -> Iterator[None]:
    """Around ``held`` and ``flat``: a column that is no tensor is refused by its name."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, NotImplementedError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"column {column!r} of {file} is {kind}, which is no tensor",
            str(error).split("\n")[0][:200],
            "numbers, lists of numbers, words and bytes are; choose others with columns=",
        ) from error


def held(array: Any) -> Any:
    """What is stored of a column."""
    import pyarrow as pa

    array = _plain(array)
    if pa.types.is_struct(array.type) and {f.name for f in array.type} == {"bytes", "path"}:
        array = _plain(array.field("bytes"))  # how Hugging Face stores images
    if pa.types.is_struct(array.type):
        raise TypeError(f'its fields are {", ".join(each.name for each in array.type)}: columns="a.b" takes one')
    if pa.types.is_nested(array.type) and not _lists_of_numbers(array.type):
        raise TypeError("maps and lists of structs have no one shape")
    return array


def _lists_of_numbers(kind: Any) -> bool:
    import pyarrow as pa

    while pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return not pa.types.is_nested(kind)


def _plain(array: Any) -> Any:
    """Without dictionaries, extensions, dates and times: these become microseconds."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("us")).cast(pa.int64())  # since 1970; finer ones that would lose are refused
    if pa.types.is_time(array.type):
        array = array.cast(pa.time64("us")).cast(pa.int64())  # since midnight
    if pa.types.is_duration(array.type):
        array = array.cast(pa.duration("us")).cast(pa.int64())
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    return array


def flat(array: Any) -> tuple[dict[str, Any], NDArray[Any], NDArray[Any] | None]:
    """What the column is, its values in a row, and where each begins (None: all alike)."""
    import pyarrow as pa
    from pyarrow import compute

    kind = array.type
    if pa.types.is_fixed_size_binary(kind):
        raw = np.frombuffer(array.buffers()[1], np.uint8) if len(array) else np.empty(0, np.uint8)
        width = kind.byte_width
        raw = raw[array.offset * width : (array.offset + len(array)) * width]
        return _about("numbers", "uint8", (width,)), raw, None
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        array = array.cast(pa.large_binary())
        offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
        data = array.buffers()[2]
        values = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        return _about("text" if text else "bytes", "uint8", (), True), values[offsets[0] : offsets[-1]], offsets
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and not pa.types.is_nested(kind.value_type):
        lengths = compute.call_function("list_value_length", [array]).to_numpy(zero_copy_only=False).astype(np.int64)
        values = _numbers(_plain(array.flatten()))
        return _about("lists", values.dtype.str, (), True), values, np.concatenate([[0], np.cumsum(lengths)])
    shape: list[int] = []
    while pa.types.is_nested(array.type):
        if pa.types.is_fixed_size_list(array.type):
            shape.append(array.type.list_size)
        else:
            lengths = np.unique(compute.call_function("list_value_length", [array]).to_numpy(zero_copy_only=False))
            if len(lengths) != 1:
                raise TypeError("lists of lists of different lengths have no one shape")
            shape.append(int(lengths[0]))
        array = _plain(array.flatten())
    if shape and array.null_count:
        raise TypeError("a value in a list is missing")
    values = _numbers(array)
    return _about("numbers", values.dtype.str, tuple(shape)), values, None


def _numbers(array: Any) -> NDArray[Any]:
    import pyarrow as pa

    if pa.types.is_boolean(array.type) or pa.types.is_floating(array.type) or pa.types.is_integer(array.type):
        values = array.to_numpy(zero_copy_only=False)
        return values if values.dtype != object else values.astype(np.float64)
    raise TypeError(f"{array.type} is not numbers")


def _about(what: str, dtype: str, shape: tuple[int, ...], ragged: bool = False) -> dict[str, Any]:
    return {"is": what, "dtype": dtype, "shape": list(shape), "ragged": ragged}

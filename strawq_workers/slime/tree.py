"""Python values of a user's samples as a tree of msgpack values, and back.

The rule: what is decoded equals what was encoded, type for type, or encoding refuses it with the path of the field; no
name of a class or function in the tree is ever imported or called, except those of a short fixed list. Equal values
that were built in the same order give equal bytes; dictionaries keep their order, since templates depend on it.

A node is a msgpack scalar (None, bool, int, float, str, bytes), or a list that starts with a tag. Arrays from
`LARGE_BYTES` on go beside the tree, into `tensors`, under the digest of their content.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from strawq.errors import BadInput, FormatUnsupported
from strawq.rows import STORABLE, Rows, bits, torch_rows, values

LARGE_BYTES = 64 << 10
DEPTH_MAX = 200

LIST, TUPLE, DICT, NDARRAY, SCALAR, TENSOR, ENUM, RECORD, IMAGE, BIG_INT, RAW_TEXT, ASIDE = range(12)

RECORDS = ("SpecInfo", "PrefixCacheInfo", "DynamicFilterOutput", "Sample")
"""Names of classes whose instances are stored by their attributes."""
ENUMS = ("Status",)

_PLAIN = (type(None), bool, float, str, bytes)
_ARRAY_KINDS = "biufcSUmM"


class Tree:
    """Encodes values. `tensors` receives large arrays; None keeps everything in the tree. `names` gives the names of
    further classes of the fixed list."""

    def __init__(self, tensors: dict[str, Rows] | None = None, names: Mapping[Any, str] | None = None) -> None:
        self.tensors = tensors
        self.names = names or {}
        self._above: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        """The node of a value. `BadInput` names the path below which something cannot be stored."""
        kind = type(value)
        if kind is str and not _is_utf8(value):
            return [RAW_TEXT, value.encode("utf-8", "surrogatepass")]
        if kind in _PLAIN:
            return value
        if kind is int:  # in hexadecimal: decimal texts of thousands of digits are refused by Python
            return value if -(1 << 63) <= value < 1 << 63 else [BIG_INT, hex(value)]
        if kind is np.ndarray:
            return self._array(value, path)
        if isinstance(value, np.generic):
            return [SCALAR, _dtype_of(value.dtype, path), value.tobytes()]
        if _is_tensor(value):
            return self._tensor(value, path)
        if _is_image(value):
            palette = bytes(value.getpalette() or ()) if value.mode in ("P", "PA") else None
            raw = np.frombuffer(value.tobytes(), np.uint8)
            return [IMAGE, value.mode, *value.size, self._array(raw, path), palette]
        name = self.names.get(kind, kind.__name__)
        if isinstance(value, Enum) and name in ENUMS:
            return [ENUM, name, self.encode(value.value, path)]
        return self._nested(value, path)

    def _nested(self, value: Any, path: str) -> Any:
        if id(value) in self._above:
            raise BadInput(f"Cyclic custom fields are not supported: {path} contains itself; break the cycle")
        if len(self._above) >= DEPTH_MAX:
            raise BadInput(f"{path} is nested more than {DEPTH_MAX} levels deep; flatten it")
        self._above.add(id(value))
        try:
            kind = type(value)
            if kind is list or kind is tuple:
                tag = LIST if kind is list else TUPLE
                return [tag, *(self.encode(item, f"{path}[{at}]") for at, item in enumerate(value))]
            if kind is dict:
                return [DICT, *self._pairs(value, path)]
            name = self.names.get(kind, kind.__name__)
            if name in RECORDS and _is_record(value):
                return [RECORD, name, *self._pairs(attributes(value), path, dotted=True)]
        finally:
            self._above.discard(id(value))
        full = f"{kind.__module__}.{kind.__qualname__}"
        raise BadInput(
            f"Unsupported durable Sample field type: {full} at {path}; store plain values, arrays or tensors there"
        )

    def _pairs(self, mapping: Mapping[Any, Any], path: str, *, dotted: bool = False) -> Iterator[Any]:
        for key, item in mapping.items():
            if type(key) not in (str, int, bool, float, bytes, tuple, type(None)):
                raise BadInput(f"Unsupported durable Sample field type: {type(key).__name__} as a key of {path}")
            yield self.encode(key, f"{path} key")
            yield self.encode(item, f"{path}.{key}" if dotted else f"{path}[{key!r}]")

    def _array(self, array: Any, path: str) -> Any:
        name = _dtype_of(array.dtype, path)
        if self._goes_aside(array.nbytes, array.dtype.name, array.ndim):
            return self._aside("ndarray", array, name)
        return [NDARRAY, name, list(array.shape), array.tobytes()]

    def _tensor(self, tensor: Any, path: str) -> Any:
        import torch

        if tensor.layout != torch.strided or tensor.is_quantized or type(tensor) is not torch.Tensor:
            raise BadInput(
                f"Unsupported durable Sample field type: {type(tensor).__name__} of layout {tensor.layout} at {path}; "
                "store a dense torch.Tensor"
            )
        name = str(tensor.dtype).removeprefix("torch.")
        data = tensor.detach().cpu()
        if self._goes_aside(data.numel() * data.element_size(), name, data.ndim):
            return self._aside("tensor", data, name)
        raw = data.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return [TENSOR, name, list(data.shape), raw]

    def _goes_aside(self, size: int, dtype: str, axes: int) -> bool:
        return self.tensors is not None and size >= LARGE_BYTES and dtype in STORABLE and axes > 0

    def _aside(self, kind: str, rows: Any, dtype: str) -> Any:
        assert self.tensors is not None
        whole = np.ascontiguousarray(bits(rows, 0, len(rows)))
        digest = blake3(repr((dtype, whole.shape)).encode())
        digest.update(whole.reshape(-1).view(np.uint8).data)
        name = f"slime.{digest.hexdigest(16)}"
        self.tensors.setdefault(name, rows)
        return [ASIDE, kind, dtype, name]


class TreeReader:
    """Decodes nodes. `classes` maps names of `RECORDS` and `ENUMS` to the classes to build."""

    def __init__(self, classes: Mapping[str, Any], tensors: Mapping[str, Rows]) -> None:
        self.classes = classes
        self.tensors = tensors
        self._readers: dict[int, Callable[[list[Any]], Any]] = {
            LIST: lambda node: [self.decode(item) for item in node],
            TUPLE: lambda node: tuple(self.decode(item) for item in node),
            DICT: self._dict,
            NDARRAY: lambda node: np.frombuffer(bytearray(node[2]), np.dtype(node[0])).reshape(node[1]),
            SCALAR: lambda node: np.frombuffer(node[1], np.dtype(node[0]))[0],
            TENSOR: lambda node: _torch_tensor(*node),
            ENUM: lambda node: self.classes[node[0]](self.decode(node[1])),
            RECORD: self._record,
            IMAGE: self._image,
            BIG_INT: lambda node: int(node[0], 16),
            RAW_TEXT: lambda node: node[0].decode("utf-8", "surrogatepass"),
            ASIDE: self._aside,
        }

    def decode(self, node: Any) -> Any:
        """The value of a node. `FormatUnsupported` for a tag that this version does not know."""
        if not isinstance(node, list):
            return node
        reader = self._readers.get(node[0])
        if reader is None:
            raise FormatUnsupported(f"a sample was stored by a newer version (tag {node[0]}): upgrade strawq here")
        return reader(node[1:])

    def _dict(self, node: list[Any]) -> dict[Any, Any]:
        return {self.decode(node[at]): self.decode(node[at + 1]) for at in range(0, len(node), 2)}

    def _record(self, node: list[Any]) -> Any:
        return build(self.classes[node[0]], self._dict(node[1:]))

    def _image(self, node: list[Any]) -> Any:
        mode, width, height, raw, palette = node
        try:
            Image: Any = import_module("PIL.Image")
        except ImportError as error:
            raise BadInput("a sample holds an image, and Pillow is not installed: pip install pillow") from error
        image = Image.frombytes(mode, (width, height), self.decode(raw).tobytes())
        if palette:
            image.putpalette(palette)
        return image

    def _aside(self, node: list[Any]) -> Any:
        kind, dtype, name = node
        rows = self.tensors[name]
        if kind == "tensor":
            return torch_rows(rows)
        return np.array(values(rows, 0, len(rows)), dtype=np.dtype(dtype))


def attributes(value: Any) -> dict[str, Any]:
    """Fields and further attributes of a record, in the order in which they were made."""
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        if field.name not in found:  # a dataclass with slots
            found[field.name] = getattr(value, field.name)
    return found


def build(kind: Any, values: Mapping[str, Any]) -> Any:
    """An instance of `kind` with these attributes; those that are no fields are set all the same."""
    if issubclass(kind, msgspec.Struct):
        return kind(**{name: value for name, value in values.items() if name in kind.__struct_fields__})
    if not dataclasses.is_dataclass(kind):
        made = kind()
        given: Mapping[str, Any] = values
    else:
        names = {field.name for field in dataclasses.fields(kind) if field.init}
        make: Any = kind
        made = make(**{name: value for name, value in values.items() if name in names})
        given = {name: value for name, value in values.items() if name not in names}
    for name, value in given.items():
        setattr(made, name, value)
    return made


def _dtype_of(dtype: np.dtype[Any], path: str) -> str:
    """NumPy's short name of a dtype, byte order included."""
    if dtype.kind not in _ARRAY_KINDS:
        raise BadInput(f"Unsupported durable Sample field type: array of {dtype} at {path}; store numbers")
    return dtype.str


def _torch_tensor(dtype: str, shape: list[int], raw: bytes) -> Any:
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise FormatUnsupported(f"a sample holds a tensor of {dtype}, which the torch that is installed does not have")
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(kind) if raw else torch.empty(0, dtype=kind)
    return flat.reshape(shape)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def _is_image(value: Any) -> bool:
    image = sys.modules.get("PIL.Image")
    return image is not None and isinstance(value, image.Image)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct) or hasattr(value, "__dict__")

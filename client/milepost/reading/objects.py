"""Objects of a checkpoint, unpickled without running what they name.

First tries torch's `weights_only=True`. If that refuses an object, an unpickler of ours reads it.
It knows more classes: plain data of Python's library and of numpy, classes that the program has
passed to `torch.serialization.add_safe_globals`, and enums that the program has imported. It calls
and builds nothing else; docs/loading.md gives the reasons. Sources:
torch/_weights_only_unpickler.py (2.13), Lib/pickle.py.
"""

from __future__ import annotations

import _compat_pickle
import collections
import enum
import functools
import importlib
import io
import os
import pathlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch._weights_only_unpickler import _get_allowed_globals, _get_user_allowed_globals

from milepost.errors import CorruptCheckpoint, LoadFailed, listed
from milepost.state.keys import imported_enum


class ObjectRefused(Exception):
    """An object names something that is not allowed; `names` are the full names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(", ".join(self.names))


def load_object(data: bytes, *, allow_pickle: bool = False, map_location: str | None = None) -> Any:
    """Return the object that `torch.save` wrote as `data`.

    allow_pickle: run whatever code the pickle names; for checkpoints that are trusted.
    map_location: where its tensors go, as for torch.load.

    Raises ObjectRefused, or torch's exceptions for damaged bytes.
    """
    return _load(lambda: io.BytesIO(data), allow_pickle, {"map_location": map_location})


def load_objects(
    checkpoint: pathlib.Path,
    data: Mapping[str, bytes],
    *,
    allow_pickle: bool = False,
    allowing: str = "load(allow_pickle=True)",
) -> dict[str, Any]:
    """Return the objects of a checkpoint, by key; see `load_object`.

    allowing: the option with which the caller can load everything, for the error's hint.

    Raises LoadFailed("unsafe-object") with the classes and keys of all refused objects,
    CorruptCheckpoint for bytes that are not an object.
    """
    found: dict[str, Any] = {}
    refused: dict[str, tuple[str, ...]] = {}
    for key, each in data.items():
        try:
            found[key] = load_object(each, allow_pickle=allow_pickle)
        except ObjectRefused as error:
            refused[key] = error.names
        except Exception as error:
            raise CorruptCheckpoint(
                "corrupt",
                f"{checkpoint} holds an object that cannot be unpickled: {key!r}: "
                f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}",
                f"`milepost verify {checkpoint}` tells whether it is damaged",
            ) from error
    if refused:
        raise _unsafe(checkpoint, refused, allowing)
    return found


def _unsafe(
    checkpoint: pathlib.Path, refused: Mapping[str, tuple[str, ...]], allowing: str
) -> LoadFailed:
    told = [f"{key!r} of {listed(names)}" for key, names in refused.items()]
    classes = dict.fromkeys(name.rpartition(".")[2] for names in refused.values() for name in names)
    return LoadFailed(
        "unsafe-object",
        f"{checkpoint} has {len(refused)} objects that name a class or function that is not "
        f"allowed: {listed(told, '; ')}",
        "if you trust them, torch.serialization.add_safe_globals(["
        f"{listed(list(classes))}]) allows these; {allowing} allows everything, and runs whatever "
        "code the checkpoint names",
    )


def load_archive(file: pathlib.Path, *, allow_pickle: bool = False, is_mapped: bool = True) -> Any:
    """Return what `torch.save` wrote to a file, on the CPU. Raises the same as `load_object`.

    is_mapped: its tensors are mapped from the file; not for files of torch before 1.6.
    """
    return _load(lambda: file, allow_pickle, {"map_location": "cpu", "mmap": is_mapped})


def _load(opened: Callable[[], Any], allow_pickle: bool, options: dict[str, Any]) -> Any:
    if allow_pickle:
        return torch.load(opened(), weights_only=False, **options)
    try:
        return torch.load(opened(), weights_only=True, **options)
    except pickle.UnpicklingError as error:
        # Our unpickler may know classes that torch does not.
        first = error
    try:
        return torch.load(opened(), weights_only=False, pickle_module=_RESTRICTED, **options)
    except _RefusedError as refused:
        raise ObjectRefused(_all_refused(opened(), refused.name)) from None
    except _NoArchiveError:
        raise first from None


def _all_refused(file: Any, first: str) -> list[str]:
    """Return all refused names of an object, including the first one that was met."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # It may find more or no names; one is known.
        named = []
    found = [name for name in named if _find(*_split(name)) is None]
    return found if first in found else [first, *found]


def _split(full: str) -> tuple[str, str]:
    module, _, name = full.rpartition(".")
    return (module, name) if module else ("builtins", name)


class _RefusedError(pickle.UnpicklingError):
    """A pickle names what is not allowed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


# --- what is allowed ------------------------------------------------------------------------------

_FACTORIES: Final[tuple[Any, ...]] = (
    None, bool, bytes, dict, float, int, list, set, str, tuple,
    collections.Counter, collections.OrderedDict, collections.deque,
)  # fmt: skip


def _make_defaultdict(factory: Any = None, *args: Any) -> Any:
    """Stand in for defaultdict: a missing key must call nothing but a class of plain data."""
    if factory not in _FACTORIES:
        raise _RefusedError(f"collections.defaultdict of {_name_of(factory)}")
    return collections.defaultdict(factory, *args)


def _reconstruct(subtype: Any, shape: Any, dtype: Any) -> Any:
    """Stand in for numpy's function of this name, which would make arrays of subclasses, too."""
    import numpy as np

    if subtype is not np.ndarray:
        raise _RefusedError(_name_of(subtype))
    return np.ndarray.__new__(np.ndarray, shape, dtype)


def _make_dtype(spec: Any, align: Any = False, copy: Any = True) -> Any:
    """Stand in for numpy.dtype: always makes a new one, since the pickle sets its state later."""
    import numpy as np

    if type(spec) is not str:
        raise _RefusedError(f"numpy.dtype of a {type(spec).__name__}")
    return np.dtype(spec, bool(align), True)


def _get_member(cls: Any, name: Any) -> Any:
    """Stand in for `getattr`, by which some Pythons pickle members of an enum."""
    if not isinstance(cls, enum.EnumMeta) or type(name) is not str:
        raise _RefusedError("builtins.getattr")
    return cls[name]


_BUILTINS: Final = (
    "bool", "bytes", "dict", "float", "frozenset", "int", "list", "range", "slice", "str", "tuple",
)  # fmt: skip
_DATES: Final = ("date", "datetime", "time", "timedelta", "timezone")
_PATHS: Final = (
    "Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath",
)  # fmt: skip
_RANDOM: Final = {
    "_pickle": ("__bit_generator_ctor", "__generator_ctor", "__randomstate_ctor"),
    "_mt19937": ("MT19937",),
    "_pcg64": ("PCG64", "PCG64DXSM"),
    "_philox": ("Philox",),
    "_sfc64": ("SFC64",),
    "_generator": ("Generator",),
    "mtrand": ("RandomState",),
    "bit_generator": ("SeedSequence", "__pyx_unpickle_SeedSequence"),
}

_ALLOWED: Final[dict[str, str | Callable[..., Any]]] = {
    "builtins.getattr": _get_member,
    "collections.defaultdict": _make_defaultdict,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.dtype": _make_dtype,
    "numpy.ndarray": "numpy:ndarray",
    "numpy._core.multiarray.scalar": "numpy._core.multiarray:scalar",
    "numpy.core.multiarray.scalar": "numpy._core.multiarray:scalar",
    "_io.BytesIO": "io:BytesIO",
    "_io.StringIO": "io:StringIO",
    "argparse.Namespace": "argparse:Namespace",
    "collections.deque": "collections:deque",
    "decimal.Decimal": "decimal:Decimal",
    "fractions.Fraction": "fractions:Fraction",
    "random.Random": "random:Random",
    "types.SimpleNamespace": "types:SimpleNamespace",
    "uuid.UUID": "uuid:UUID",
    **{f"builtins.{name}": f"builtins:{name}" for name in _BUILTINS},
    **{f"datetime.{name}": f"datetime:{name}" for name in _DATES},
    **{
        f"{module}.{name}": "pathlib:" + ("PureWindowsPath" if name == "WindowsPath" else name)
        for module in ("pathlib", "pathlib._local")
        for name in _PATHS
        if os.name == "posix"
    },
    **{
        f"numpy.random.{module}.{name}": f"numpy.random.{module}:{name}"
        for module, names in _RANDOM.items()
        for name in names
    },
}
"""What is allowed besides torch's own list: where it is, or what stands in for it. Making such an
object runs only its own code, which just keeps what it is given."""

_NAMED_ONLY: Final = frozenset({"numpy.ndarray"})
"""What a pickle may name but not call."""


@functools.cache
def _allowed(full: str) -> Any:
    where = _ALLOWED.get(full)
    if not isinstance(where, str):
        return where
    module, _, name = where.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None  # numpy is not installed, or too old or new to have it.


def _find(module: str, name: str) -> Any:
    """Return what a pickle may use under a name, or None."""
    full = f"{module}.{name}"
    found = _get_allowed_globals().get(full)
    if found is None:
        found = _get_user_allowed_globals().get(full)  # type: ignore[no-untyped-call]
    if found is None:
        found = _allowed(full)
    return imported_enum(module, name) if found is None else found


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', repr(thing))}"


# --- the unpickler --------------------------------------------------------------------------------

_LISTS: Final = frozenset({list, collections.deque})
_SETS: Final = frozenset({set})
_DICTS: Final = frozenset(
    {dict, collections.Counter, collections.OrderedDict, collections.defaultdict}
)
_IS_SIMPLE: Final = (None, None, None)
"""Subarray, names and fields of a dtype without structure."""


_PythonUnpickler: Any = pickle._Unpickler
"""The unpickler that is written in Python, so that each of its steps can be replaced."""


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    """Finds only what is allowed, calls only that, and sets the state only of objects made that
    way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._callable: set[int] = set()
        """Ids of everything that `find_class` returned; these objects live as long as their
        modules.
        """

    def find_class(self, module: str, name: str) -> Any:
        if self.proto < 3 and self.fix_imports:
            module, name = _compat_pickle.NAME_MAPPING.get(
                (module, name), (_compat_pickle.IMPORT_MAPPING.get(module, module), name)
            )
        found = _find(module, name)
        if found is None:
            raise _RefusedError(f"{module}.{name}")
        if f"{module}.{name}" not in _NAMED_ONLY:
            self._callable.add(id(found))
        return found

    def _checked(self, called: Any) -> Any:
        if id(called) not in self._callable:
            raise _RefusedError(_name_of(called))
        return called

    def load_reduce(self) -> None:
        args = self.stack.pop()
        called = self._checked(self.stack[-1])
        if isinstance(called, enum.EnumMeta) and len(args) != 1:
            raise _RefusedError(_name_of(called))
        self.stack[-1] = called(*args)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        cls = self._checked(self.stack.pop())
        self.append(cls.__new__(cls, *args))

    def load_newobj_ex(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        cls = self._checked(self.stack.pop())
        self.append(cls.__new__(cls, *args, **kwargs))

    def load_build(self) -> None:
        made, state = self.stack[-2], self.stack[-1]
        cls = type(made)
        is_known = id(cls) in self._callable or cls.__module__.partition(".")[0] == "numpy"
        if not is_known or isinstance(made, type | enum.Enum):
            raise _RefusedError(_name_of(cls))
        if cls.__module__ == "numpy.dtypes" and not _is_simple(state):
            raise _RefusedError("numpy.dtype with fields")
        super().load_build()

    def _fillable(self, target: Any, classes: frozenset[type]) -> Any:
        if type(target) not in classes and id(type(target)) not in self._callable:
            raise _RefusedError(_name_of(type(target)))
        return target

    def load_append(self) -> None:
        value = self.stack.pop()
        self._fillable(self.stack[-1], _LISTS).append(value)

    def load_appends(self) -> None:
        values = self.pop_mark()
        self._fillable(self.stack[-1], _LISTS).extend(values)

    def load_additems(self) -> None:
        values = self.pop_mark()
        self._fillable(self.stack[-1], _SETS).update(values)

    def load_setitem(self) -> None:
        value, name = self.stack.pop(), self.stack.pop()
        self._fillable(self.stack[-1], _DICTS)[name] = value

    def load_setitems(self) -> None:
        values = self.pop_mark()
        target = self._fillable(self.stack[-1], _DICTS)
        for name, value in zip(values[::2], values[1::2], strict=True):
            target[name] = value

    def load_refused(self) -> None:
        raise pickle.UnpicklingError("an opcode that no object of torch's needs")

    dispatch: Final = {
        **_PythonUnpickler.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.ADDITEMS[0]: load_additems,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        **dict.fromkeys(
            (code[0] for code in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4)),
            load_refused,
        ),
    }


def _is_simple(state: Any) -> bool:
    return isinstance(state, tuple) and state[2:5] == _IS_SIMPLE


class _NoArchiveError(pickle.UnpicklingError):
    """A file of torch before 1.6, which is several pickles in a row."""


def _load_refused(*_args: Any, **_kwargs: Any) -> Any:
    raise _NoArchiveError("not an archive of torch.save")


_RESTRICTED: Final = SimpleNamespace(
    __name__="pickle", Unpickler=_Unpickler, load=_load_refused, UnpicklingError=_RefusedError
)
"""What `torch.load` takes as its pickle module. `load` is for files of torch before 1.6."""

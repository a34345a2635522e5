"""Slots that bring an array back when somebody reads them.

An evicted array leaves a *hole* behind: in an attribute of a graph node or a function (the object
changes to a subclass of its class whose property of that name restores on reading, and changes back
when the last hole is filled), or in the one-element list that a Chainer `Variable` keeps its array
in. So no reader, inside Chainer or outside, can meet a missing value; hooks only make it early.

What it does not cover: objects without a `__dict__`, and arrays inside lists that an attribute
holds (left unmanaged).

Invariants kept here:
  3. Reading a hole gives the value (or raises, and the hole stays).
  4. A filled object has its own class and a plain `__dict__` again.
"""

from __future__ import annotations

import enum
import functools
import sys
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

from dynamemo.storage import Array, Hole, Storage

#: Key in the instance dictionary of an object with holes: attribute name -> template.
_HOLES = "_dynamemo_holes"

#: Code objects of readers that only look whether an array is there (the binding fills it): to
#: them a hole reads as None, as data that was never retained does.
PEEKERS: set[CodeType] = set()


def _is_peeking() -> bool:
    frame = sys._getframe(2)
    if frame.f_code in PEEKERS:
        return True
    caller = frame.f_back
    return caller is not None and caller.f_code in PEEKERS


#: Lazy class -> the class that it stands for.
_behind: dict[type, type] = {}


def original_class(obj: object) -> type:
    """Return the class of an object as its owner knows it, with or without holes."""
    cls = type(obj)
    return _behind.get(cls, cls)


def class_behind(cls: type) -> type:
    """Return the class that a lazy class stands for; another class itself."""
    return _behind.get(cls, cls)


@functools.cache
def _lazy_class(cls: type) -> type:
    def reduce_whole(self: Any, protocol: Any) -> Any:
        held = [getattr(self, name) for name in names_with_holes(self)]
        reduced = self.__reduce_ex__(protocol)
        del held
        return reduced

    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__slots__": (),
        "__reduce_ex__": reduce_whole,
    }
    for name in ("__copy__", "__deepcopy__"):
        if hasattr(cls, name):
            namespace[name] = _whole_first(name)
    # Made beside the class and then put under it: classes that watch their subclasses
    # (`__init_subclass__`, a metaclass that registers them) are not told of this one.
    lazy = type.__new__(type(cls), cls.__name__, (_Beside,), namespace)
    lazy.__bases__ = (cls,)
    _behind[lazy] = cls
    return lazy


class _Beside:
    """Where a lazy class is born."""


def _whole_first(name: str) -> Callable[..., Any]:
    """Make a method that restores the object and then calls its own method of that name."""

    def call(self: Any, *arguments: Any) -> Any:
        held = [getattr(self, attribute) for attribute in names_with_holes(self)]
        result = getattr(self, name)(*arguments)
        del held
        return result

    return call


def _lazy_property(lazy: type, name: str) -> property:
    """Make the property that stands for attribute `name` in objects with holes."""

    def read(self: Any) -> Any:
        holes = self.__dict__.get(_HOLES)
        if holes is not None and name in holes:
            if _is_peeking():
                return None
            _complete(self, name)
        if name in self.__dict__:
            return self.__dict__[name]
        return getattr(super(lazy, self), name)

    def write(self: Any, value: Any) -> None:
        _discard(self, name)
        self.__dict__[name] = value

    def delete(self: Any) -> None:
        _discard(self, name)
        self.__dict__.pop(name, None)

    return property(read, write, delete)


def _complete(obj: Any, name: str) -> None:
    """Restore all of an attribute; what is back is held, so that the rest cannot push it out."""
    held: list[Any] = []
    while missing := holes_of(obj, name):
        missing[0].restore()
        template = obj.__dict__.get(_HOLES, {}).get(name)
        if type(template) is dict:
            held.extend(template.values())
        elif type(template) is tuple:
            held.extend(template)


def _holes_in(template: Any) -> list[Hole]:
    if isinstance(template, Hole):
        return [template]
    if type(template) is dict:
        template = template.values()
    elif type(template) is not tuple:
        return []
    return [item for item in template if isinstance(item, Hole)]


def _discard(obj: Any, name: str) -> Any:
    """Take the template of `name` out of the object; give the class back with the last one."""
    holes = obj.__dict__.get(_HOLES)
    template = None if holes is None else holes.pop(name, None)
    if holes is not None and not holes:
        del obj.__dict__[_HOLES]
        obj.__class__ = original_class(obj)
    return template


def has_holes(obj: object) -> bool:
    """Tell whether some attribute of the object is away, wholly or in part."""
    return type(obj) in _behind


def data_of(node: Any) -> Array | None:
    """Return the array that a graph node retains, None where it retains none or it is away."""
    if type(node) in _behind:
        return node.__dict__.get("_data")
    return node._data  # without making the node a dictionary


def names_with_holes(obj: object) -> list[str]:
    """Return the attributes of the object that are away, wholly or in part."""
    return list(obj.__dict__.get(_HOLES, ()))


def holes_of(obj: object, name: str) -> list[Hole]:
    """Return the holes in attribute `name`, none where it is complete."""
    holes = obj.__dict__.get(_HOLES)
    if holes is None or name not in holes:
        return []
    return _holes_in(holes[name])


class AttributeSlot:
    """An array that is an attribute of an object, or an item of a tuple or dictionary that is one.

    A tuple is replaced by another; a dictionary stays the same object.
    """

    __slots__ = ("_index", "_name", "_owner", "_owner_id")

    def __init__(self, owner: object, name: str, index: int | str | None = None) -> None:
        self._owner = weakref.ref(owner)
        self._owner_id = id(owner)
        self._name = name
        #: Position in the tuple or key in the dictionary; None: the attribute is the array itself.
        self._index = index

    def key(self) -> tuple[int, str, int | str | None]:
        """Return (identity of the owner, attribute, index)."""
        return self._owner_id, self._name, self._index

    @property
    def owner(self) -> object | None:
        """The object that holds the array, or None when it died."""
        return self._owner()

    def get(self) -> Array | None:
        """Return the array held now; None where the owner died or the attribute has a hole."""
        owner = self._owner()
        if owner is None:
            return None
        value = self._value(owner)
        if self._index is not None:
            try:
                value = value[self._index]
            except (LookupError, TypeError):
                return None
        return None if isinstance(value, Hole) else value

    def _value(self, owner: object) -> Any:
        """Return the attribute, also where some items of it are away."""
        value = owner.__dict__.get(self._name)
        return owner.__dict__.get(_HOLES, {}).get(self._name) if value is None else value

    def is_shared(self) -> bool:
        """Tell whether somebody else holds the container now, and so the array in it."""
        if self._index is None:
            return False
        # Expected references: the owner's and getrefcount's argument.
        return sys.getrefcount(self._value(self._owner())) > 2

    def empty(self, hole: Hole) -> None:
        """Leave the hole in place of the array and let the owner restore on reading."""
        owner = self._owner()
        if owner is None:
            return
        contents = owner.__dict__
        holes = contents.setdefault(_HOLES, {})
        container = contents.pop(self._name, None)
        if container is None:
            container = holes.get(self._name)
        if self._index is None:
            holes[self._name] = hole
        elif type(container) is dict:
            container[self._index] = hole
            holes[self._name] = container
        else:
            items = enumerate(container)
            holes[self._name] = tuple([hole if i == self._index else item for i, item in items])
        lazy = _lazy_class(original_class(owner))
        if self._name not in lazy.__dict__:
            setattr(lazy, self._name, _lazy_property(lazy, self._name))
        if type(owner) is not lazy:
            owner.__class__ = lazy

    def fill(self, storage: Storage, arrays: list[Array]) -> None:
        """Put the array where the hole is."""
        owner = self._owner()
        holes = None if owner is None else owner.__dict__.get(_HOLES)
        if owner is None or holes is None or self._name not in holes:
            return
        complete = _filled(holes[self._name], storage, arrays)
        if _holes_in(complete):
            holes[self._name] = complete
        else:
            _discard(owner, self._name)
            owner.__dict__[self._name] = complete


def _filled(template: Any, storage: Storage, arrays: list[Array]) -> Any:
    """Return the template with the storage's holes filled."""
    if isinstance(template, Hole):
        return arrays[template.index] if template.storage is storage else template
    if type(template) is dict:
        for key, item in template.items():
            template[key] = _filled(item, storage, arrays)
        return template
    if type(template) is tuple:
        return tuple([_filled(item, storage, arrays) for item in template])
    return template


def can_have_holes(obj: object) -> bool:
    """Tell whether arrays that are attributes of the object can be evicted."""
    cls: Any = type(obj)
    return _can_be_lazy(cls)


@functools.cache
def _can_be_lazy(cls: type) -> bool:
    if not hasattr(cls, "__weakref__") or not hasattr(cls, "__dict__"):
        return False
    try:
        _lazy_class(class_behind(cls))
    except TypeError:
        return False  # another layout in memory, or a class that nothing may derive from
    return True


_item_of = list.__getitem__


class VariableBox(list[Any]):
    """The one-element list of a Variable, able to hold a hole and to tell who reads it.

    `on_outside_access(box)` is called before a reader that `is_benign(frame)` does not know gets
    the array: it may write into it.
    """

    __slots__ = ("__weakref__", "hole", "on_outside_access", "subject", "variable")

    def __init__(
        self,
        array: Array,
        subject: Any,
        on_outside_access: Callable[[Any], None],
        variable: Any,
    ) -> None:
        super().__init__((array,))
        self.hole: Hole | None = None
        #: The variable whose list this is (weakly).
        self.variable = weakref.ref(variable)
        #: What `on_outside_access` is told about (a storage, a parameter's version).
        self.subject = subject
        self.on_outside_access = on_outside_access

    def __getitem__(self, index: Any) -> Any:
        if self.hole is not None:
            self.hole.restore()
        if self.subject is not None:
            frame = sys._getframe(1)
            reader = _known_reader(id(frame.f_code))
            if reader is _ACCESSOR and frame.f_back is not None:
                # Nearly always this is Chainer itself, by way of one accessor.
                reader = _known_reader(id(frame.f_back.f_code))
            is_known = reader is _BENIGN or reader is _LOOKING
            if not is_known and not _reader_is_benign(frame):
                self.on_outside_access(self.subject)
        return _item_of(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.hole = None
        self.subject = None
        super().__setitem__(index, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ([self[0]],)

    def peek(self) -> Array | None:
        """Return the array without restoring and without telling anybody."""
        return _item_of(self, 0)

    def put(self, array: Array) -> None:
        """Set the array without forgetting the subject."""
        super().__setitem__(0, array)


#: Module of the accessors on the way from a reader to the list.
_ACCESSORS = "chainer.variable"
#: Methods and properties of Variable that look at the array and neither hand it out nor write.
_LOOKERS = frozenset(
    {
        "__len__",
        "__repr__",
        "__str__",
        "addgrad",
        "backward",
        "cleargrad",
        "debug_print",
        "device",
        "dtype",
        "grad",
        "grad_var",
        "is_initialized",
        "label",
        "ndim",
        "retain_data",
        "shape",
        "size",
        "summary",
        "variable_repr",
        "variable_str",
        "xp",
        "zerograd",
    }
)
#: Methods of Link that look at arrays of parameters and do not hand them out.
_LINK_LOOKERS = frozenset(
    {"cleargrads", "count_params", "namedparams", "params", "zerograds", "<genexpr>"}
)
#: Chainer's own modules that hand arrays to the user or write into them.
_WRITERS = ("chainer.serializer", "chainer.link", "chainer.testing", "chainer.datasets")


class _Reader(enum.Enum):
    """What a frame on the way to an array is."""

    #: Hands the array on to its caller.
    ACCESSOR = enum.auto()
    #: Looks at the array and never shows it to its caller.
    LOOKING = enum.auto()
    BENIGN = enum.auto()
    #: May write into it.
    OUTSIDE = enum.auto()


#: What the code objects of Chainer and of dynamemo are, by identity; `_known_codes` keeps them
#: alive. Nobody else's: a code of the user's must not be kept alive from here.
_known_readers: dict[int, _Reader] = {}
_known_codes: list[CodeType] = []
_known_reader = _known_readers.get
_ACCESSOR, _LOOKING, _BENIGN = _Reader.ACCESSOR, _Reader.LOOKING, _Reader.BENIGN
_MOST_KNOWN = 10_000


def _reader_is_benign(frame: Any) -> bool:
    while frame is not None:
        reader = _known_reader(id(frame.f_code)) or _classify(frame)
        if reader is not _ACCESSOR:
            return reader is _BENIGN or reader is _LOOKING
        frame = frame.f_back
    return False


def _classify(frame: Any) -> _Reader:
    code, module = frame.f_code, frame.f_globals.get("__name__", "")
    if not module.startswith(("chainer.", "dynamemo.")):
        return _Reader.OUTSIDE
    reader = _classify_inside(code.co_name, module)
    if len(_known_codes) < _MOST_KNOWN:
        _known_codes.append(code)
        _known_readers[id(code)] = reader
    return reader


def _classify_inside(name: str, module: str) -> _Reader:
    if module == _ACCESSORS:
        return _LOOKING if name in _LOOKERS else _ACCESSOR
    # `chainer.link` defines Link (copyparams, serialize); `chainer.links` are layers.
    if module == "chainer.link":
        is_benign = name in _LINK_LOOKERS
    else:
        is_benign = not module.startswith(_WRITERS) or module.startswith("chainer.links.")
    return _BENIGN if is_benign else _Reader.OUTSIDE


class VariableSlot:
    """The array of a Chainer `Variable`, through its box."""

    __slots__ = ("_box", "_box_id")

    def __init__(self, box: VariableBox) -> None:
        self._box = weakref.ref(box)
        self._box_id = id(box)

    def key(self) -> tuple[int, str, int | str | None]:
        """Return (identity of the box, "box", 0)."""
        return self._box_id, "box", 0

    @property
    def owner(self) -> VariableBox | None:
        """The box, or None when the variable died."""
        return self._box()

    def get(self) -> Array | None:
        """Return the array held now."""
        box = self._box()
        return None if box is None or box.hole is not None else box.peek()

    def is_shared(self) -> bool:
        """Tell whether somebody else holds the box: the variable's copies share it, as one."""
        return False

    def empty(self, hole: Hole) -> None:
        """Leave the hole in the box."""
        box = self._box()
        if box is not None:
            box.hole = hole
            box.put(None)

    def fill(self, storage: Storage, arrays: list[Array]) -> None:
        """Put the array into the box."""
        box = self._box()
        if box is not None and box.hole is not None and box.hole.storage is storage:
            array = arrays[box.hole.index]
            box.hole = None
            box.put(array)

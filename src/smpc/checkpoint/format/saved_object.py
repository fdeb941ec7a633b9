"""Objects of any class among the user's content: how they are saved and restored. Neither runs any code.

    user_content={"args": argparse.Namespace(lr=0.1), "config": GPT2Config(...)}
    resume_from_checkpoint(...)["args"]      SavedObject of argparse.Namespace: {"lr": 0.1}

The name of the class and the attributes of the instance are saved, each by the same rules; for an object without attributes (a function,
a lock, an enum's member) its `repr`. It comes back as a mapping of the attributes, which can also be read as attributes: the class is not
imported, so a file cannot choose what is imported.
"""

from __future__ import annotations

import re
from typing import Any

_LONGEST = 500
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class SavedObject(dict[str, Any]):
    """The attributes of an object that was saved. `class_name` is its class; `text` its repr if it has no attributes."""

    def __init__(self, class_name: str, attributes: dict[str, Any], text: str = "") -> None:
        super().__init__(attributes)
        vars(self).update(class_name=class_name, text=text)

    class_name: str
    text: str

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the saved {self.class_name} has no attribute {name!r}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"SavedObject({self.class_name}, {self.text or dict(self)!r})"


def name_of(value: Any) -> str:
    """The class of an object."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def attributes_of(value: Any) -> dict[str, Any]:
    """The saved attributes of an object, without those that its class computes."""
    found: dict[str, Any] = {}
    for cls in reversed(type(value).__mro__):
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found | dict(getattr(value, "__dict__", {}))


def text_of(value: Any) -> str:
    """The repr of an object without its address, shortened; what its class is if it has none."""
    try:
        return _ADDRESS.sub("", repr(value))[:_LONGEST]
    except Exception as error:  # whatever a user's __repr__ raises
        return f"<{name_of(value)}, whose repr raises {type(error).__name__}>"

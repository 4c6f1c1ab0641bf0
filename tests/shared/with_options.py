"""Arguments of our doors for tests that have them in one flat table."""

from dataclasses import fields
from typing import Any


def with_options(options_class: Any, **arguments: Any) -> dict[str, Any]:
    """Returns the arguments with the fields of an options class in `options=`."""
    names = {field.name for field in fields(options_class)}
    options = {name: value for name, value in arguments.items() if name in names}
    others = {name: value for name, value in arguments.items() if name not in names}
    return {**others, "options": options_class(**options)} if options else others

"""`scale-train plan --help`, made from the dataclass of its options."""

from __future__ import annotations

import inspect
from dataclasses import replace

import scale_train.plan.options
from scale_train.configuration.fields import fields_of
from scale_train.configuration.help import HELP, help_page
from scale_train.plan.options import GROUPS, PlanOptions


def plan_help_text(width: int | None = None) -> str:
    """Returns all options of `scale-train plan`, by groups."""
    fields = {field.name: field for field in fields_of(PlanOptions, "plan", scale_train.plan.options)}
    fields["json"] = replace(fields["json"], placeholder="", default=None)  # `plan` takes no word after a flag
    groups = {title: [fields[name] for name in names] for title, names in GROUPS.items()}
    return help_page("usage: scale-train plan [OPTIONS]", inspect.getdoc(PlanOptions) or "", (HELP,), groups, width)

"""The commands that this package adds to `scale-train`, as its entry points name them; nothing here loads torch."""

from __future__ import annotations

from scale_tools.doctor.options import DoctorOptions
from scale_tools.pipe.options import PipeOptions
from scale_tools.plan.options import PlanOptions, plan_help_text
from scale_tools.snapshot.options import SnapshotOptions
from scale_tools.why.options import WhyOptions
from scale_train.commands import Command

PLAN = Command(
    "Say which parallelism fits the memory of a machine, and what each costs.",
    PlanOptions,
    "scale_tools.plan.command:plan",
    plan_help_text,
)
DOCTOR = Command(
    "Test if training on several ranks works here, and how fast memory and links are.",
    DoctorOptions,
    "scale_tools.doctor.command:doctor",
)
PIPE = Command("Draw the schedule of a pipeline, planned and measured.", PipeOptions, "scale_tools.pipe.command:pipe")
SNAPSHOT = Command(
    "List, verify, compare, convert and prune checkpoints.", SnapshotOptions, "scale_tools.snapshot.commands:snapshot"
)
WHY = Command("Say in one sentence why a run on several ranks ended.", WhyOptions, "scale_tools.why.command:why")

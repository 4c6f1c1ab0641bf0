"""`scale-train why`. Exit codes: 0 the logs say why; 1 they do not; 2 there are no logs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from scale_tools.why.options import WhyOptions
from scale_tools.why.reading import missing_paths, read_texts
from scale_tools.why.verdict import verdict


def why(options: WhyOptions) -> int:
    """Prints the sentence and, below it, what each rank did last; without logs, one line."""
    try:
        texts = read_texts(options.logs)
    except ValueError as error:
        print(f"scale-train: {error}", file=sys.stderr)
        return 2
    for path in missing_paths(options.logs):
        print(f"scale-train: {path}: no such file or folder", file=sys.stderr)
    explanation = verdict(texts)
    if options.json:
        print(json.dumps({**asdict(explanation), "num_logs": len(texts)}))
    else:
        print(explanation.sentence or _no_cause(len(texts)))
        for line in explanation.details:
            print(f"  {line}")
    return 0 if explanation.sentence else 1


def _no_cause(num_logs: int) -> str:
    return (
        f"these {num_logs} logs do not say why. If a rank was killed, only torchrun knows it: keep what torchrun "
        "prints, torchrun ... 2> torchrun.log, and name torchrun.log as well"
    )

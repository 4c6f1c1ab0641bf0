"""`scale-train why`. Exit codes: 0 the logs say why; 1 they do not; 2 there are no logs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from scale_tools.why.options import WhyOptions
from scale_tools.why.reading import read_texts
from scale_tools.why.verdict import verdict


def why(options: WhyOptions) -> int:
    """Prints the sentence and, below it, what each rank did last; without logs, one line."""
    try:
        texts = read_texts(options.logs)
    except ValueError as error:
        print(f"scale-train: {error}", file=sys.stderr)
        return 2
    explanation = verdict(texts)
    if options.json:
        print(json.dumps({**asdict(explanation), "num_logs": len(texts)}))
    else:
        print(explanation.sentence or f"these {len(texts)} logs do not say why")
        for line in explanation.details:
            print(f"  {line}")
    return 0 if explanation.sentence else 1

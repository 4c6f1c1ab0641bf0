"""Models and the `Trainer` of transformers.

Begin with `model`, which `--model` builds; `config` reads a `config.json` without torch, `trainer` is the `Trainer`.
"""

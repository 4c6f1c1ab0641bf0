"""Weights in the form that the ecosystem has them: folders of safetensors files, as Hugging Face writes and reads them.

Begin with `loading` and `saving`; `conversion` has the names, `folder` the files, `materialize` a model's memory.
"""

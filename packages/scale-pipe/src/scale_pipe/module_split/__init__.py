"""`split`: cuts any model by the names of its modules; each stage runs the model's own forward.

Begin with `split`; `replay` runs the forward of a stage, `placeholder_tensor` stands for what other stages have.
"""

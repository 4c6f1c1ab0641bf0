"""`parallelize`: divides the layers of a model that exists already.

Begin with `parallelize`; `styles` has the entries of a plan, `validation` refuses plans that would be wrong.
"""

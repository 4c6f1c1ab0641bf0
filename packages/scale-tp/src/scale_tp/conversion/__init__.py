"""`parallelize`: divides the layers of a model that exists already.

Begin with `parallelize`; `styles` has what a plan may say, `validation` refuses plans that would be wrong.
"""

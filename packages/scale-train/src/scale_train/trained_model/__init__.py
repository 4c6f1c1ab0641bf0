"""What is done with a trained model: `scale-train ppl` and `scale-train export`.

Begin with `loading.py`.
"""

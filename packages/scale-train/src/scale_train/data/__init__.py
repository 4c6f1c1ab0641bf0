"""The text that a model is trained on. Begin with `text`; `tokenizer` turns bytes into tokens."""

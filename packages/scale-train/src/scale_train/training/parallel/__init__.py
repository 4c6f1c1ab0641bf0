"""The GPT under each `--parallel`. Begin with `engine`, which the trainer calls; each way has a file below it."""

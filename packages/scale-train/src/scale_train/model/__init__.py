"""The GPT that is trained. Begin with `gpt`; its sizes are `config`."""

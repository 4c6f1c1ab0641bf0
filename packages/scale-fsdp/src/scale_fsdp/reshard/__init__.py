"""Parameters that get another device, dtype or other ranks while the model lives; and those on the meta device.

Begin with `reshard`; `meta_init` gives values to parameters that have none yet.
"""

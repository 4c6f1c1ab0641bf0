"""Parameters that change their place while the model lives: device, dtype, ranks; and those that have no values yet."""

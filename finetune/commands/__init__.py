"""The commands, one file each: ``add_arguments(parser)`` says what a command takes, ``run(options)`` does it."""

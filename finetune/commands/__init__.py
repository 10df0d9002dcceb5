"""The commands that are more than a few lines of ``finetune.cli``: one file each, with a ``main(words)``."""

"""How both commands read settings: YAML, options and text become frozen dataclasses, each mistake is told by its place."""

from configuration.keys import Key, keys_of
from configuration.reader import Reader
from configuration.tree import Tree

__all__ = ["Key", "Reader", "Tree", "keys_of"]

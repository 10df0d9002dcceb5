"""Which model ``model.path`` means: a folder, a run or a name of the hub, known again by a hash."""

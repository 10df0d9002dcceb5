"""Faults under load: ``make chaos``, or ``make chaos CASE=kill`` for one of them."""

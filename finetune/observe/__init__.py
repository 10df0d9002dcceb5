"""What a run shows of itself: lines, logs, metrics, curves, a report."""

"""A checkpoint's folder on disk: its files, the manifest that proves them, which is the newest, who holds it."""

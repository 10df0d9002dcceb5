"""Programs that measure Tessera beside its peers; what they found is under ``results/``."""

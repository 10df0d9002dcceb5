"""Every error training tells anyone about.

FinetuneError                   exit code in ``exit_code``
├── ConfigError                 a configuration key, file or model at fault                exit 2
│   ├── DataError               a training text at fault; names file and line or byte      exit 2
│   └── WeightNotFinite         a loaded tensor holds NaN or infinity; names it            exit 2
└── RunError                    training itself failed                                     exit 1
    ├── NotFinite               loss or gradients not finite too often; names the last good checkpoint
    ├── LossSpike               the loss rose suddenly and spike.action is stop; names the last good checkpoint
    └── RankDied                a rank ended before its work was done
"""

from __future__ import annotations


class FinetuneError(Exception):
    """Root of the tree. The message is written for the person who reads it."""

    exit_code = 1


class ConfigError(FinetuneError):
    """A key, a file or the model of the configuration breaks a rule; the message names all three."""

    exit_code = 2


class DataError(ConfigError):
    """A text cannot be used; the message names the file and, where there is one, the line."""


class WeightNotFinite(ConfigError):
    """A tensor of a checkpoint, an adapter or a resume state holds a number that is not finite."""


class RunError(FinetuneError):
    """Training failed after it had started."""


class NotFinite(RunError):
    """Three steps in a row had a loss or gradient that is not a finite number."""


class LossSpike(RunError):
    """The loss rose far above what was usual, and the run was asked to stop then."""


class RankDied(RunError):
    """A rank process ended by a signal or an error."""

    told: bool = False
    """Whether the rank itself told the cause, by a rule it checks: a setting, data, a full disk."""

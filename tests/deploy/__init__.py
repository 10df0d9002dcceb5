"""What ``deploy/`` says, tried with the programs it is said to: ``make test-deploy``."""

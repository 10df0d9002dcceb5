"""What ranks need of libraries, imported by importing this."""

import torch.distributed  # noqa: F401

import serve.worker.canary
import serve.worker.exchange
import serve.worker.loader
import serve.worker.parallel
import serve.worker.runner
import serve.worker.step_loop
import serve.worker.verify  # noqa: F401

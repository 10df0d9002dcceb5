"""Offline work: a file of requests in, a file of answers out, by any number of servers; a run goes on where one was ended."""

from serve.client.offline.lines import BadLine
from serve.client.offline.run import FileReport, generate_file

__all__ = ["BadLine", "FileReport", "generate_file"]

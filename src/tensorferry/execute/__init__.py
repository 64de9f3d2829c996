"""Moving bytes as a plan says."""

from tensorferry.execute.base import Counters, Executor
from tensorferry.execute.feed import Feeder
from tensorferry.execute.simple import SimpleExecutor
from tensorferry.execute.stream import stream
from tensorferry.execute.threaded import ThreadedExecutor

__all__ = ["Counters", "Executor", "Feeder", "SimpleExecutor", "ThreadedExecutor", "stream"]
